"""New special tokens: a copy of the tokenizer has them, and the model rows for them, on any mesh."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.data.chat_data import ASSETS, OPEN_ASSISTANT, conversation, write_rows
from tests.helpers import run_world
from tests.training import small_config, small_trainer, weights_digest
from toolkit.data.chat.choose_format import chat_format
from toolkit.data.chat.sft import ChatOptions, ConversationEncoder
from toolkit.data.chat.shapes import Shape
from toolkit.data.tokenizers.added import extend_tokenizer
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer, vocabulary_size
from toolkit.errors import DataError
from toolkit.generation.load import load_model

TOKENS = ["<|system|>", "<|prompter|>", "<|assistant|>", "<|endoftext|>"]
VOCABULARY = 4096


@pytest.mark.parametrize("kind", ["tokenizer", "tokenizer_json", "tokenizer_sentencepiece"])
def test_a_copy_has_them_after_all_others(tmp_path: Path, kind: str) -> None:
    original = load_tokenizer(ASSETS / kind)
    copy = extend_tokenizer(ASSETS / kind, tmp_path, tokens=TOKENS)
    assert extend_tokenizer(ASSETS / kind, tmp_path, tokens=TOKENS) == copy
    assert extend_tokenizer(ASSETS / kind, tmp_path, tokens=TOKENS[:2]) != copy
    tokenizer = load_tokenizer(copy)
    added = dict(zip(TOKENS, range(VOCABULARY, VOCABULARY + 4), strict=True))
    assert tokenizer.special_tokens == original.special_tokens | added
    assert tokenizer.n_words == vocabulary_size(copy) == VOCABULARY + 4
    assert (tokenizer.bos_id, tokenizer.eos_id) == (original.bos_id, original.eos_id)
    for text in ("a text", "<|assistant|> is text", "naïve 😀"):
        assert tokenizer.encode(text) == original.encode(text)
    form = chat_format(tokenizer, OPEN_ASSISTANT)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a<|endoftext|>"}]
    ids, [(begin, end)] = form.encode_turns(messages)
    special = [token for token in ids if token >= VOCABULARY]
    assert [TOKENS[token - VOCABULARY] for token in special] == [TOKENS[1], TOKENS[3], TOKENS[2], TOKENS[3]]
    assert ids[begin - 1] == added["<|assistant|>"] and ids[end - 1] == added["<|endoftext|>"]
    assert TOKENS[2] in tokenizer.decode(ids)
    assert added["<|endoftext|>"] in form.stop_ids
    with pytest.raises(DataError, match=r"already has the token <\|prompter\|>\n  fix:  remove it"):
        extend_tokenizer(copy, tmp_path, tokens=TOKENS[1:2])


def test_a_token_that_is_there_and_not_special_is_refused(tmp_path: Path) -> None:
    """Hugging Face's libraries keep its id, and number those after it one lower."""
    described = json.loads((ASSETS / "tokenizer_json" / "tokenizer.json").read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    described["added_tokens"].append({"id": VOCABULARY, "content": "<tool_call>", **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    with pytest.raises(DataError, match="already has the token <tool_call>"):
        extend_tokenizer(tmp_path, tmp_path, tokens=["<x>", "<tool_call>"])


def test_other_tokens_make_another_cache_of_conversations(tmp_path: Path) -> None:
    orders = (TOKENS, TOKENS[::-1], [])
    copies = [extend_tokenizer(ASSETS / "tokenizer", tmp_path, tokens=order) for order in orders]
    tokenizers = list(map(load_tokenizer, copies))
    encoders = [
        ConversationEncoder(tokenizer, Shape("messages"), ChatOptions(OPEN_ASSISTANT), "uint16")
        for tokenizer in tokenizers
    ]
    assert len({str(encoder.fingerprint) for encoder in encoders}) == 3


def test_transformers_reads_the_copy(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    copy = extend_tokenizer(ASSETS / "tokenizer_json", tmp_path, tokens=TOKENS)
    judge, tokenizer = AutoTokenizer.from_pretrained(copy), load_tokenizer(copy)
    messages = conversation(random.Random(2))
    messages = [m | {"content": m["content"].replace("<|eot_id|>", "")} for m in messages]
    expected = judge.apply_chat_template(messages, chat_template=OPEN_ASSISTANT, return_dict=False)
    assert chat_format(tokenizer, OPEN_ASSISTANT).encode(messages, generation_prompt=False) == expected


def _save(folder: Path, *, tied: bool) -> torch.Tensor:
    """A small model with the shipped tokenizer; its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8)
    shape |= dict(num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=tied)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape))
    model.save_pretrained(folder)
    shutil.copy(ASSETS / "tokenizer" / "tokenizer.model", folder)
    return model.get_input_embeddings().weight.detach()


def _config(folder: Path, tied: bool, world: int, **tables: Any) -> Any:
    shape = dict.fromkeys(("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim"))  # none of small_config's
    own = {"vocab_size": VOCABULARY + 8, "additional_special_tokens": TOKENS}
    return small_config(
        folder / f"{tied} {world} {' '.join(tables)}",
        model=shape | own | {"hf_assets_path": str(folder / f"tied {tied}")},
        data={"format": "messages", "chat_template": OPEN_ASSISTANT},
        training={"dataset_path": str(folder / "a.jsonl"), "seq_len": 128, "steps": 2},
        checkpoint={"enable": True, "initial_load_in_hf": True, "last_save_in_hf": True},
        parallelism=tables,
    )


def _digests(folder: str, tied: bool) -> list[Any]:
    world = torch.distributed.get_world_size()
    layouts = [{}] if world == 1 else [{}, {"tensor_parallel_degree": 2}]
    found = []
    for tables in layouts:
        trainer = small_trainer(_config(Path(folder), tied, world, **tables))
        (model,) = trainer.model_parts.models
        digest = weights_digest(model)
        embedding = dict(model.named_parameters())["tok_embeddings.weight"]
        assert isinstance(embedding, DTensor)
        rows = embedding.full_tensor().detach().clone().numpy()  # training changes them
        trainer.train()
        found.append((digest, rows, [record["loss"] for record in trainer.history]))
    return found


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_rows_are_the_mean_on_any_mesh_and_are_handed_on(tmp_path: Path, tied: bool) -> None:
    embedding = _save(tmp_path / f"tied {tied}", tied=tied)
    rng = random.Random(4)
    rows = [{"messages": conversation(rng)} for _ in range(60)]
    write_rows(tmp_path / "a.jsonl", rows)
    [(digest, found, losses)] = run_world(_digests, 1, str(tmp_path), tied)[0]
    for ranks in run_world(_digests, 2, str(tmp_path), tied):
        for other, _, on_mesh in ranks:
            assert other == digest
            assert on_mesh == pytest.approx(losses, rel=1e-5)
    assert torch.equal(torch.from_numpy(found[:VOCABULARY]), embedding)
    mean = embedding.double().mean(0).float()
    assert torch.equal(torch.from_numpy(found[VOCABULARY:]), mean.expand(8, -1))

    config = _config(tmp_path, tied, 1)
    loaded = load_model(config.job.dump_folder, device=torch.device("cpu"), dtype=torch.float32)
    assert loaded.tokenizer is not None
    assert chat_format(loaded.tokenizer).encode(rows[0]["messages"]) == chat_format(
        loaded.tokenizer, OPEN_ASSISTANT
    ).encode(rows[0]["messages"])  # the template goes with it
    assert loaded.tokenizer.special_tokens["<|prompter|>"] == VOCABULARY + 1
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (export,) = Path(config.job.dump_folder, "hf").iterdir()
    judge = AutoTokenizer.from_pretrained(export)
    assert judge.chat_template == OPEN_ASSISTANT
    assert judge.convert_tokens_to_ids(TOKENS) == list(range(VOCABULARY, VOCABULARY + 4))
    assert AutoModelForCausalLM.from_pretrained(export).config.vocab_size == VOCABULARY + 8
