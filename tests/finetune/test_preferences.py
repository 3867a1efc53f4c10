"""Preferences: pairs from files to rows, and the loss and its gradient, by trl's own and without packing."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.data.chat_data import ASSETS, write_rows
from tests.models.small_llama import small
from toolkit.config import load_config
from toolkit.config.finetune import DPO, Finetune
from toolkit.data.build import open_data, run_tokenizer
from toolkit.data.chat.shapes import Shape
from toolkit.data.conversation_rows import ConversationRows, statistics
from toolkit.data.preference_rows import UnpairedRows, conversation_rows
from toolkit.data.token_files import TokenCache
from toolkit.errors import DataError
from toolkit.finetune.apply import apply_finetune
from toolkit.finetune.preferences import dpo_losses, preference_objective, without_adapter
from toolkit.models.common.decoder import Decoder

SEQ_LEN = 256


def _pairs(n: int) -> list[dict[str, Any]]:
    chance = random.Random(n)

    def words(most: int) -> str:
        return " ".join(chance.choices(["one", "two", "three", "four"], k=chance.randint(1, most)))

    return [{"prompt": words(6), "chosen": words(12), "rejected": words(12)} for _ in range(n)]


def _config(file: Path, *flags: str) -> Any:
    return load_config(
        [
            f"--training.dataset_path={file}", f"--data.cache_folder={file.parent}",
            "--data.format=preference",
            f"--model.hf_assets_path={ASSETS / 'tokenizer'}", f"--training.seq_len={SEQ_LEN}",
            "--data.chat_template=llama3", "--finetune.objective=dpo", "--finetune.adapter=lora", *flags,
        ]
    )  # fmt: skip


def _cache(folder: Path, rows: list[dict[str, Any]], *flags: str) -> TokenCache:
    config = _config(write_rows(folder / "pairs.jsonl", rows), *flags)
    return open_data(config, progress=False).caches["training"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    return _cache(tmp_path_factory.mktemp("pairs"), _pairs(40))


@pytest.fixture(scope="module")
def labeled(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": number % 3 > 0}
        for number, row in enumerate(_pairs(40))
    ]
    return _cache(
        tmp_path_factory.mktemp("labeled"),
        rows,
        "--finetune.objective=kto",
        "--data.format=unpaired_preference",
    )


def _batch(cache: TokenCache, *, packing: bool) -> dict[str, Tensor | None]:
    rows = conversation_rows(cache, SEQ_LEN, packing=packing)
    samples = [rows.sample(k) for k in range(len(rows))]
    return {name: torch.from_numpy(np.stack([it[name] for it in samples])) for name in samples[0]}


# --- data ------------------------------------------------------------------------------------------

ASKED, YES, NO = (
    {"role": role, "content": text}
    for role, text in (("user", "2 + 2?"), ("assistant", "4"), ("assistant", "5"))
)
SAME = [
    {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
    {"prompt": [ASKED], "chosen": [YES], "rejected": [NO]},
    {"chosen": [ASKED, YES], "rejected": [ASKED, NO]},
    {"prompt": "2 + 2?", "chosen": [ASKED, YES], "rejected": [ASKED, NO]},
]


def test_each_form_gives_the_same_pair(tmp_path: Path) -> None:
    cache = _cache(tmp_path, SAME)
    assert cache.paired and cache.n_documents == 2 * len(SAME)
    tokenizer = run_tokenizer(_config(tmp_path / "pairs.jsonl"))
    end = tokenizer.special_tokens["<|eot_id|>"]
    for number, answer in enumerate(["4", "5"] * len(SAME)):
        here = slice(cache.offsets[number], cache.offsets[number + 1])
        learnt = cache.tokens[here][cache.mask[here] == 1]
        assert learnt.tolist() == [*tokenizer.encode(answer), end]
        assert (cache.tokens[here] == cache.tokens[: cache.offsets[1]]).sum() >= cache.offsets[1] - 1


def test_only_what_comes_after_the_last_common_message_is_learnt() -> None:
    talk = [ASKED, YES, {"role": "user", "content": "3 + 1?"}]
    chosen, rejected = Shape("preference").conversations(
        {"chosen": [*talk, YES], "rejected": [*talk, NO]}, ""
    )
    assert chosen.first == rejected.first == 3
    [one, other] = Shape("preference").conversations({"chosen": [*talk, YES], "rejected": [*talk, YES]}, "")
    assert one.first == other.first == 3


def test_a_pair_shares_a_row_the_chosen_first(cache: TokenCache) -> None:
    for packing in (True, False):
        rows = ConversationRows(cache, SEQ_LEN, packing=packing)
        held = rows.conversations.reshape(-1, 2)
        assert (held[:, 0] % 2 == 0).all() and (held[:, 1] == held[:, 0] + 1).all()
        assert sorted(rows.conversations) == list(range(cache.n_documents))
        assert (rows.starts % 2 == 0).all() and (packing or (np.diff(rows.starts) == 2).all())


@pytest.mark.parametrize("seq_len", [1, 2, 40, 41, 57, 200])
def test_a_pair_that_is_too_long_is_cut_and_counted(cache: TokenCache, seq_len: int) -> None:
    whole = np.diff(cache.offsets) - 1
    rows = ConversationRows(cache, seq_len, packing=True)
    for (first, second), (kept, other) in zip(
        rows.conversations.reshape(-1, 2), rows.places.reshape(-1, 2), strict=True
    ):
        assert kept + other == min(whole[first] + whole[second], seq_len - (seq_len % 2 and kept == other))
        assert min(whole[first], whole[second], seq_len // 2) <= min(kept, other)
    told = statistics(cache, rows)
    lost = (whole[rows.conversations] - rows.places).sum()
    assert told.tokens_cut == lost and told.pairs == len(rows.conversations) // 2


def test_equal_answers_are_noted(tmp_path: Path) -> None:
    alike = {"prompt": "a", "chosen": "b", "rejected": "b"}
    cache = _cache(tmp_path, [*_pairs(3), alike, *_pairs(2), alike])
    told = str(statistics(cache, ConversationRows(cache, SEQ_LEN, packing=True)))
    assert "7 pairs, 2 with identical answers, which have no effect" in told


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, "no column 'rejected', which format preference needs"),
        ({"chosen": "b", "rejected": "c"}, "line 1: there is no prompt\n  fix:  name its column"),
        ({"prompt": "a", "chosen": [YES], "rejected": "c"}, "one of chosen and rejected is a list"),
        (
            {"prompt": "a", "chosen": "b", "rejected": " "},
            "rejected, message 2: the assistant's turn is empty",
        ),
        ({"chosen": [], "rejected": []}, "chosen: the conversation has no message"),
        ({"prompt": "a", "chosen": 1, "rejected": "c"}, "column 'chosen' contains a JSON number"),
        ({"chosen": [ASKED], "rejected": [ASKED, NO]}, "no assistant message in the loss"),
    ],
)
def test_bad_pairs_end_in_one_message(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=re.escape(said)):
        _cache(tmp_path, [row])


def test_a_pair_goes_where_one_of_it_has_nothing_to_learn(tmp_path: Path) -> None:
    cache = _cache(
        tmp_path, [*_pairs(2), {"chosen": [ASKED], "rejected": [ASKED, NO]}], "--data.empty_mask=drop"
    )
    assert sorted(ConversationRows(cache, SEQ_LEN, packing=True).conversations) == [0, 1, 2, 3]


def test_a_label_is_read_and_a_prompt_has_the_answer_before_it_beside_it(labeled: TokenCache) -> None:
    assert labeled.labels is not None and not labeled.paired
    assert labeled.labels.tolist() == [number % 3 > 0 for number in range(40)]
    rows = conversation_rows(labeled, SEQ_LEN, packing=True)
    assert isinstance(rows, UnpairedRows) and len(rows) < 20
    assert "26 desirable" in str(statistics(labeled, rows))
    examples = list(_examples(labeled))
    for k in range(len(rows)):
        row = rows.sample(k)
        there = rows.conversations[rows.starts[k] : rows.starts[k + 1]]
        for number, index in enumerate(there):
            assert row["desirable"][number] == labeled.labels[index]
            here = row["mismatched_documents"] == number
            prompt, answer = examples[index]["prompt_ids"], examples[index - 1]["completion_ids"]
            assert row["mismatched_tokens"][here].tolist() == [*prompt, *answer][:-1]
            learnt = row["mismatched_labels"][here]
            assert learnt[learnt >= 0].tolist() == answer


def test_answers_of_pairs_are_labeled_and_get_those_of_the_pair_before(tmp_path: Path) -> None:
    cache = _cache(tmp_path, _pairs(5), "--finetune.objective=kto")
    assert cache.labels is not None and not cache.paired
    assert cache.labels.tolist() == [1, 0] * 5
    rows = conversation_rows(cache, SEQ_LEN, packing=False)
    assert isinstance(rows, UnpairedRows)
    assert rows.others.tolist() == [(number - 2) % 10 for number in range(10)]


@pytest.mark.parametrize("seq_len", [20, 30, 60])
def test_long_answers_are_cut_and_keep_a_token_in_the_loss(labeled: TokenCache, seq_len: int) -> None:
    rows = conversation_rows(labeled, seq_len, packing=True)
    for row in map(rows.sample, range(len(rows))):
        for prefix in ("", "mismatched_"):
            documents, labels = row[f"{prefix}documents"], row[f"{prefix}labels"]
            count = documents.max() + 1
            assert all((labels[documents == number] >= 0).any() for number in range(count))
        assert row["documents"].max() == row["mismatched_documents"].max()


@pytest.mark.parametrize("label", [1, "true", None])
def test_a_label_is_true_or_false(tmp_path: Path, label: Any) -> None:
    row = {"prompt": "a", "completion": "b", "label": label}
    with pytest.raises(DataError, match=r"line 1: column 'label' contains .*\n  fix:  write true"):
        _cache(tmp_path, [row], "--finetune.objective=kto", "--data.format=unpaired_preference")


# --- the loss --------------------------------------------------------------------------------------


def _model(cache: TokenCache, dtype: torch.dtype) -> Decoder:
    """A model whose adapter changes what it says."""
    with torch.device("meta"):
        model = Decoder(small(vocab_size=cache.n_words), loss_chunk_tokens=100)
    model.to(dtype)
    options = Finetune.model_validate(
        {"adapter": "lora", "objective": "dpo", "lora": {"target_modules": ["all-linear"]}}
    )
    apply_finetune(model, options, frozen_dtype=dtype)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.1)
    return model


def _loss(
    model: Decoder, batch: dict[str, Tensor | None], objective: str, **options: Any
) -> tuple[Tensor, dict[str, float]]:
    """The mean over the pairs of the batch, and what is reported."""

    def forward(batch: dict[str, Tensor | None]) -> Tensor:
        tokens, *others = (batch[name] for name in ("tokens", "positions", "documents", "labels"))
        return model(tokens, **dict(zip(("positions", "documents", "labels"), others, strict=True)))

    table = Finetune.model_validate({"objective": objective, objective: options})
    compared = preference_objective(table, None)
    assert model.output is not None
    model.output.reduction = compared.reduction
    batch = compared.prepare(batch)
    if compared.measures:
        with torch.no_grad():
            compared.measured = compared.measure(batch, [model], forward)
    batch = compared.with_reference(batch, [model], forward)
    loss, sums = compared(forward(batch), batch)
    count = compared.count([batch])
    return loss / count, dict(zip(compared.names, (sums[1:] / count).tolist(), strict=True))


def _gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [it for it in model.parameters() if it.requires_grad]))


def test_packed_answers_are_those_that_are_not(labeled: TokenCache) -> None:
    model = _model(labeled, torch.float64)
    (packed, told), (padded, also) = (
        _loss(model, _batch(labeled, packing=it), "kto") for it in (True, False)
    )
    assert packed.item() == pytest.approx(padded.item(), rel=1e-12)
    assert told == pytest.approx(also, rel=1e-9)
    torch.testing.assert_close(_gradients(model, packed), _gradients(model, padded), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("objective", "options"),
    [("dpo", {}), ("dpo", {"loss_type": "ipo"}), ("cpo", {}), ("simpo", {}), ("orpo", {})],
    ids=str,
)
def test_packed_pairs_are_those_that_are_not(
    cache: TokenCache, objective: str, options: dict[str, Any]
) -> None:
    model = _model(cache, torch.float64)
    (packed, told), (padded, also) = (
        _loss(model, _batch(cache, packing=it), objective, **options) for it in (True, False)
    )
    assert packed.item() == pytest.approx(padded.item(), rel=1e-12) != pytest.approx(np.log(2), rel=1e-3)
    assert told == pytest.approx(also, rel=1e-9)
    torch.testing.assert_close(_gradients(model, packed), _gradients(model, padded), rtol=1e-9, atol=1e-12)


def test_without_its_adapter_a_model_is_what_it_was(cache: TokenCache) -> None:
    model = _model(cache, torch.float64)
    plain = Decoder(model.args).double()
    plain.load_state_dict({name: model.state_dict()[name] for name in plain.state_dict()})
    tokens = torch.arange(20)[None]
    with without_adapter([model]):
        assert torch.equal(model(tokens), plain(tokens))
    assert not torch.allclose(model(tokens), plain(tokens))


class _AsHuggingFace(nn.Module):
    """Answers to what trl asks of a model, from the logits of ours."""

    is_gradient_checkpointing = False

    def __init__(self, model: Decoder, *, adapter: bool):
        super().__init__()
        self.model, self.adapter = model, adapter

    def forward(self, input_ids: Tensor, labels: Tensor, **options: Any) -> Any:
        if self.adapter:
            logits = self.model(input_ids)
        else:
            with without_adapter([self.model]):
                logits = self.model(input_ids)
        shifted = labels[:, 1:]
        picked = logits[:, :-1].log_softmax(-1).gather(-1, shifted.clamp(min=0)[..., None])[..., 0]
        nothing = torch.zeros_like(picked)
        return SimpleNamespace(
            log_probs=picked * (shifted != -100), entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
        )


def _examples(cache: TokenCache) -> Iterator[dict[str, list[int]]]:
    names = ("chosen_ids", "rejected_ids") if cache.paired else ("completion_ids",)
    for number in range(0, cache.n_documents, len(names)):
        example = {}
        for index, name in enumerate(names, number):
            here = slice(cache.offsets[index], cache.offsets[index + 1])
            ids, first = cache.tokens[here].tolist(), int(cache.mask[here].argmax())
            assert cache.mask[here][first:].all()
            example |= {"prompt_ids": ids[:first], name: ids[first:]}
        yield example


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
def test_the_loss_is_that_of_trl(cache: TokenCache, loss_type: str) -> None:
    pytest.importorskip("trl")
    from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer

    model = _model(cache, torch.float32)
    trainer, metrics = _spied(
        model, beta=0.3, loss_types=[loss_type], loss_weights=[1.0], label_smoothing=0.0,
        f_divergence_type="reverse_kl", ld_alpha=None, use_weighting=False,
    )  # fmt: skip
    inputs = DataCollatorForPreference(pad_token_id=0)(list(_examples(cache)))
    expected = DPOTrainer._compute_loss(trainer, trainer.model, inputs, False)
    found, told = _loss(model, _batch(cache, packing=True), "dpo", beta=0.3, loss_type=loss_type)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert told == pytest.approx({name: metrics["train"][name][0] for name in told}, rel=1e-4)
    for mine, theirs in zip(_gradients(model, found), _gradients(model, expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5 * theirs.abs().max().item())


def _spied(model: Decoder, **options: Any) -> tuple[Any, Any]:
    """A stand-in for trl's trainers with a reference, and the metrics that it logs."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x
    )
    metrics: Any = defaultdict(lambda: defaultdict(list))
    return SimpleNamespace(
        model=_AsHuggingFace(model, adapter=True), ref_model=_AsHuggingFace(model, adapter=False),
        accelerator=accelerator, args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False, precompute_ref_logps=False, _metrics=metrics, _total_train_tokens=0,
        _tp_size=1, **options,
    ), metrics  # fmt: skip


def _learn(model: Decoder, batch: dict[str, Tensor | None]) -> None:
    """Make all answers likelier than they are to the reference, so that their divergence is positive."""
    trained = [it for it in model.parameters() if it.requires_grad]
    tokens, *others = (batch[name] for name in ("tokens", "positions", "documents", "labels"))
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    for _ in range(8):
        optimizer.zero_grad()
        model(
            tokens, **dict(zip(("positions", "documents", "labels"), others, strict=True))
        ).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.5, 0.7)])
def test_ktos_loss_is_that_of_trl(labeled: TokenCache, weights: tuple[float, float]) -> None:
    """The batch is the whole corpus, over which both move the answers by one."""
    pytest.importorskip("trl")
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference, KTOTrainer

    assert labeled.labels is not None
    model = _model(labeled, torch.float64)
    _learn(model, _batch(labeled, packing=True))
    trainer, metrics = _spied(
        model, beta=0.3, loss_type="kto", calculate_KL=True, desirable_weight=weights[0],
        undesirable_weight=weights[1],
    )  # fmt: skip
    trainer._compute_kl_logps = lambda *it: KTOTrainer._compute_kl_logps(trainer, *it)
    examples: list[Any] = list(_examples(labeled))
    answers = [example["completion_ids"] for example in examples]
    for number, example in enumerate(examples):
        example |= {"KL_completion_ids": answers[number - 1], "label": bool(labeled.labels[number])}
    inputs = DataCollatorForUnpairedPreference(pad_token_id=0)(examples)
    expected = KTOTrainer._compute_loss(trainer, trainer.model, inputs, False)
    options = {"beta": 0.3, "desirable_weight": weights[0], "undesirable_weight": weights[1]}
    found, told = _loss(model, _batch(labeled, packing=True), "kto", **options)
    assert metrics["train"]["kl"][0] > 0.1, "else clamped"
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)
    assert told == pytest.approx({name: metrics["train"][name][0] for name in told}, rel=1e-9)
    for mine, theirs in zip(_gradients(model, found), _gradients(model, expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8 * theirs.abs().max().item())


class _OfLogits(nn.Module):
    """Answers to what trl asks of a model in its trainers without a reference."""

    def __init__(self, model: Decoder):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        return SimpleNamespace(logits=self.model(input_ids))


def _pair_batch(example: dict[str, list[int]]) -> dict[str, Tensor]:
    """One pair as trl batches it, so that its means over the tokens of a batch are those of the pair."""
    batch = {}
    prompt = example["prompt_ids"]
    for name in ("chosen", "rejected"):
        ids = torch.tensor([prompt + example[f"{name}_ids"]])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        batch |= {f"{name}_input_ids": ids, f"{name}_attention_mask": torch.ones_like(ids)}
        batch[f"{name}_labels"] = labels
    return batch


REFERENCE_FREE = [
    ("cpo", {"beta": 0.3, "alpha": 0.7}),
    ("cpo", {"beta": 0.2, "alpha": 0.0, "label_smoothing": 0.1}),
    ("cpo", {"beta": 0.3, "alpha": 1.0, "loss_type": "hinge"}),
    ("simpo", {"beta": 2.5, "gamma": 1.2, "label_smoothing": 0.05}),
    ("orpo", {"beta": 0.4}),
]


@pytest.mark.parametrize(("objective", "options"), REFERENCE_FREE, ids=str)
def test_a_loss_without_a_reference_is_that_of_trl(
    cache: TokenCache, objective: str, options: dict[str, Any]
) -> None:
    """But for ORPO's loss of the chosen answer, which trl takes over the prompt too."""
    pytest.importorskip("trl")
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    model = _model(cache, torch.float64)
    kind = "simpo" if objective == "simpo" else options.get("loss_type", "sigmoid")
    trainer: Any = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu")), is_encoder_decoder=False, pad_token_id=0,
        padding_value=0,
        aux_loss_enabled=False, concatenated_inputs=CPOTrainer.concatenated_inputs, alpha=0.0,
        get_batch_logps=CPOTrainer.get_batch_logps, beta=options["beta"], loss_type=kind,
        simpo_gamma=options.get("gamma", 0), label_smoothing=options.get("label_smoothing", 0),
        cpo_alpha=options.get("alpha", float(objective == "orpo")),
    )  # fmt: skip
    losses, rewards = [], []
    for example in _examples(cache):
        pair = _pair_batch(example)
        if objective == "orpo":
            _, _, _, _, nll = CPOTrainer.concatenated_forward(trainer, _OfLogits(model), pair)
            chosen, rejected, *_ = ORPOTrainer.concatenated_forward(trainer, _OfLogits(model), pair)
            odds, *of_pair, _, _ = ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)
            loss = nll - odds
        else:
            chosen, rejected, _, _, nll = CPOTrainer.concatenated_forward(trainer, _OfLogits(model), pair)
            loss, *of_pair = CPOTrainer.cpo_loss(trainer, chosen, rejected)
            loss = loss + trainer.cpo_alpha * nll
        losses.append(loss)
        rewards.append(of_pair)
    expected = torch.cat(losses).mean()
    found, told = _loss(model, _batch(cache, packing=True), objective, **options)
    close = 1e-6 if objective == "orpo" else 1e-9  # trl's odds are in fp32
    assert found.item() == pytest.approx(expected.item(), rel=close)
    for name, values in zip(("chosen", "rejected"), zip(*rewards, strict=True), strict=True):
        assert told[f"rewards/{name}"] == pytest.approx(torch.cat(values).mean().item(), rel=close)
    for mine, theirs in zip(_gradients(model, found), _gradients(model, expected), strict=True):
        largest = theirs.abs().max().item()
        torch.testing.assert_close(mine, theirs, rtol=10 * close, atol=10 * close * largest)


def test_some_pairs_may_be_taken_for_wrong() -> None:
    """Conservative DPO: with half of them wrong, no order is better than the other."""
    ratios, learnt = torch.tensor([[[2.0, -1.0], [-1.0, 2.0]]]), torch.ones(1, 2, 2)
    plain = dpo_losses(ratios, learnt, DPO())[0]
    assert plain[0, 0] < plain[0, 1]
    smooth = dpo_losses(ratios, learnt, DPO(label_smoothing=0.25))[0]
    torch.testing.assert_close(smooth, 0.75 * plain + 0.25 * plain.flip(1))
    half = dpo_losses(ratios, learnt, DPO(label_smoothing=0.5))[0]
    torch.testing.assert_close(half[0, 0], half[0, 1])
