"""Convert a tiktoken tokenizer to a tokenizer.json for transformers. Imports no torch.

A tiktoken file ranks tokens, but Hugging Face's tokenizers needs the pairs that merge into each token. If a
whole word is a token, it is used directly (``ignore_merges``), as in tiktoken. Otherwise the pair whose
result has the lowest rank merges first. So every pair of tokens that forms a token is listed, by its rank.
"""

from __future__ import annotations

import json

from toolkit.data.tokenizers.tiktoken_ranks import form_of, read_ranks
from toolkit.data.tokenizers.tokenizer import Tokenizer


def tokenizer_json(tokenizer: Tokenizer, content: bytes) -> dict[str, bytes]:
    """Return tokenizer.json and tokenizer_config.json for a tiktoken ``tokenizer``, whose file is
    ``content``."""
    ranks = read_ranks(content, tokenizer.path)
    names = {token: name for name, token in tokenizer.special_tokens.items()}
    bos = names[tokenizer.bos_id] if tokenizer.bos_id is not None else None
    described = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True,
            }
            for token, name in sorted(names.items())
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split", "pattern": {"Regex": form_of(len(ranks), tokenizer.path).pattern},
                    "behavior": "Isolated", "invert": False,
                },
                _byte_level(add_prefix_space=False, use_regex=False),
            ],
        },
        "post_processor": post_processor(tokenizer),
        "decoder": _byte_level(add_prefix_space=True, use_regex=True),
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            "vocab": {visible(token): rank for token, rank in ranks.items()},
            "merges": [f"{visible(left)} {visible(right)}" for left, right in merges(ranks)],
        },
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": names.get(tokenizer.eos_id) if tokenizer.eos_id is not None else None,
        "pad_token": names.get(tokenizer.pad_id) if tokenizer.pad_id is not None else None,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    said = {key: value for key, value in config.items() if value is not None}
    return {
        "tokenizer.json": json.dumps(described, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(said, indent=2).encode(),
    }


def merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the merges by which a BPE encodes as tiktoken does with ``ranks``: tiktoken merges any neighbors
    whose joined bytes have a rank, so every split of every token is one, in the order of ranks."""
    found = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        found += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return found


def _byte_level(*, add_prefix_space: bool, use_regex: bool) -> dict[str, object]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def post_processor(tokenizer: Tokenizer) -> dict[str, object] | None:
    """Return the post-processor that puts BOS before a text, as in Meta's own files; None without BOS."""
    if not tokenizer.adds_bos:
        return None
    token = tokenizer.bos_id
    [name] = [name for name, special in tokenizer.special_tokens.items() if special == token]
    bos = {"SpecialToken": {"id": name, "type_id": 0}}
    second = {"SpecialToken": {"id": name, "type_id": 1}}
    one, two = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, one],
        "pair": [bos, one, second, two],
        "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]}},
    }


def byte_characters() -> dict[int, str]:
    """Return the visible character of each byte in ``tokenizer.json``, as in GPT-2's tokenizer."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


_CHARACTERS = byte_characters()


def visible(token: bytes) -> str:
    """Return a token in byte characters."""
    return "".join(_CHARACTERS[byte] for byte in token)
