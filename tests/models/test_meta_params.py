"""params.json of Meta's releases, by the values they publish, and back."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import DataError
from toolkit.models import on_disk
from toolkit.models.common.args import ModelArgs, RopeScaling
from toolkit.models.llama.args import PRESETS
from toolkit.models.llama.meta_params import params_json, read_args
from toolkit.models.registry import families

PUBLISHED = {
    ("llama2", "7B"): '{"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-05, '
    '"vocab_size": -1}',
    ("llama2", "13B"): '{"dim": 5120, "multiple_of": 256, "n_heads": 40, "n_layers": 40, "norm_eps": 1e-05, '
    '"vocab_size": -1}',
    ("llama2", "70B"): '{"dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3, "n_heads": 64, '
    '"n_kv_heads": 8, "n_layers": 80, "norm_eps": 1e-05, "vocab_size": -1}',
    ("llama3.0", "8B"): '{"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, '
    '"multiple_of": 1024, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-05, "rope_theta": 500000.0}',
    ("llama3.1", "8B"): '{"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, '
    '"ffn_dim_multiplier": 1.3, "multiple_of": 1024, "norm_eps": 1e-05, "rope_theta": 500000.0, '
    '"use_scaled_rope": true}',
    ("llama3.1", "405B"): '{"dim": 16384, "ffn_dim_multiplier": 1.2, "multiple_of": 4096, "n_heads": 128, '
    '"n_kv_heads": 8, "n_layers": 126, "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": true, '
    '"vocab_size": 128256}',
    ("llama3.2", "1B"): '{"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, '
    '"ffn_dim_multiplier": 1.5, "multiple_of": 256, "norm_eps": 1e-05, "rope_theta": 500000.0, '
    '"use_scaled_rope": true}',
    ("llama3.2", "3B"): '{"dim": 3072, "ffn_dim_multiplier": 1.0, "multiple_of": 256, "n_heads": 24, '
    '"n_kv_heads": 8, "n_layers": 28, "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": true, '
    '"vocab_size": 128256}',
}
"""Contents of the files of the releases."""


def written(folder: Path, params: dict[str, Any]) -> Path:
    (folder / "params.json").write_text(json.dumps(params))
    return folder


@pytest.mark.parametrize(("model", "text"), PUBLISHED.items(), ids=lambda value: str(value)[:24])
def test_a_release_is_its_preset(model: tuple[str, str], text: str, tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(text)
    name, flavor = model
    assert read_args(tmp_path, vocab_size=32000) == PRESETS[name][flavor]


def test_another_family_with_such_files_takes_none_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_disk, "families", lambda: (*families(), families()[0]))
    (model, text), *_ = PUBLISHED.items()
    (tmp_path / "params.json").write_text(text)
    assert on_disk.read_meta_params(tmp_path, vocab_size=32000) == PRESETS[model[0]][model[1]]


@pytest.mark.parametrize(("model", "text"), PUBLISHED.items(), ids=lambda value: str(value)[:24])
def test_of_a_release_only_metas_fields_are_written(model: tuple[str, str], text: str) -> None:
    """Meta's programs pass every field to a dataclass, which refuses others."""
    name, flavor = model
    theirs = {"dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier"}
    theirs |= {"norm_eps", "rope_theta", "use_scaled_rope"}
    assert params_json(PRESETS[name][flavor]).keys() <= theirs


@st.composite
def shapes(draw: st.DrawFn) -> ModelArgs:
    kv, groups, head = draw(st.integers(1, 8)), draw(st.integers(1, 4)), 2 * draw(st.integers(1, 32))
    heads = kv * groups
    dim = draw(st.sampled_from([heads * head, 96, 2048]))
    scaling = RopeScaling(
        draw(st.sampled_from([2.0, 8.0, 32.0])),
        draw(st.sampled_from([1.0, 2.0])),
        4.0,
        draw(st.integers(8, 9000)),
    )
    return ModelArgs(
        dim=dim,
        n_layers=draw(st.integers(1, 40)),
        n_heads=heads,
        n_kv_heads=kv,
        ffn_dim=draw(st.integers(1, 60000)),
        vocab_size=draw(st.integers(1, 200000)),
        head_dim=head,
        norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        rope_theta=draw(st.sampled_from([1e4, 5e5, 1e6])),
        rope_scaling=draw(st.sampled_from([None, scaling])),
        max_seq_len=draw(st.sampled_from([2048, 4096, 8192, 131072])),
        tie_embeddings=draw(st.booleans()),
    )


@given(args=shapes())
def test_what_is_written_is_read_again(args: ModelArgs, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = written(tmp_path_factory.mktemp("params"), params_json(args))
    assert read_args(folder, vocab_size=7) == args


def test_the_small_models_of_3_2_stay_themselves_when_one_field_differs(tmp_path: Path) -> None:
    for changes in ({"tie_embeddings": False}, {"rope_scaling": RopeScaling(8.0)}, {"max_seq_len": 8192}):
        args = replace(PRESETS["llama3.2"]["1B"], **changes)
        assert read_args(written(tmp_path, params_json(args)), vocab_size=7) == args


SMALL = params_json(replace(PRESETS["llama3.1"]["debugmodel"], n_kv_heads=4))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"moe_args": {"num_experts": 16}}, "mixtures of experts"),
        ({"vision_chunk_size": 560}, "vision"),
        ({"quantization_args": {"scheme": "int4"}}, "quantized"),
        ({"use_qk_norm": True}, "normalize"),
        ({"dim": 250}, "dim = 250: must be a multiple of n_heads"),
        ({"n_kv_heads": 5}, "n_kv_heads = 5: must divide n_heads"),
        ({"head_dim": 15}, "head_dim = 15: must be even"),
        ({"n_layers": None}, "n_layers is missing"),
        ({"vocab_size": -2}, "vocab_size = -2"),
        ({"hidden_dim": 0}, "hidden_dim = 0"),
        ({"use_scaled_rope": 1}, "use_scaled_rope = 1: must be true or false"),
    ],
)
def test_what_is_no_llama_is_refused_by_field(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_args(written(tmp_path, SMALL | changes), vocab_size=7)
    assert says in str(caught.value) and "params.json" in str(caught.value)


@pytest.mark.skipif("TOOLKIT_ASSETS" not in os.environ, reason="TOOLKIT_ASSETS is not set")
def test_a_real_file_that_spells_everything_out() -> None:
    from toolkit.models.on_disk import read_hf_config

    folder = Path(os.environ["TOOLKIT_ASSETS"], "stories260K")
    assert read_args(folder / "meta", vocab_size=7) == read_hf_config(folder / "hf")
