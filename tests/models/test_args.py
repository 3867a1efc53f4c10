import subprocess
import sys
from dataclasses import replace

import pytest

from toolkit.errors import ConfigError
from toolkit.models.common.args import MoEArgs, RopeScaling
from toolkit.models.llama.args import PRESETS
from toolkit.models.parameters import parameter_count
from toolkit.models.registry import presets, resolve

# As published: layers, dim, heads, kv heads, ffn, vocabulary, head dim, theta, context, tied, parameters.
PUBLISHED = {
    ("llama2", "7B"): (32, 4096, 32, 32, 11008, 32000, 128, 1e4, 4096, False, 6_738_415_616),
    ("llama2", "13B"): (40, 5120, 40, 40, 13824, 32000, 128, 1e4, 4096, False, 13_015_864_320),
    ("llama2", "70B"): (80, 8192, 64, 8, 28672, 32000, 128, 1e4, 4096, False, 68_976_648_192),
    ("llama3.0", "8B"): (32, 4096, 32, 8, 14336, 128256, 128, 5e5, 8192, False, 8_030_261_248),
    ("llama3.0", "70B"): (80, 8192, 64, 8, 28672, 128256, 128, 5e5, 8192, False, 70_553_706_496),
    ("llama3.1", "8B"): (32, 4096, 32, 8, 14336, 128256, 128, 5e5, 131072, False, 8_030_261_248),
    ("llama3.1", "70B"): (80, 8192, 64, 8, 28672, 128256, 128, 5e5, 131072, False, 70_553_706_496),
    ("llama3.1", "405B"): (126, 16384, 128, 8, 53248, 128256, 128, 5e5, 131072, False, 405_853_388_800),
    ("llama3.2", "1B"): (16, 2048, 32, 8, 8192, 128256, 64, 5e5, 131072, True, 1_235_814_400),
    ("llama3.2", "3B"): (28, 3072, 24, 8, 8192, 128256, 128, 5e5, 131072, True, 3_212_749_824),
    ("llama3.3", "70B"): (80, 8192, 64, 8, 28672, 128256, 128, 5e5, 131072, False, 70_553_706_496),
    ("llama3", "8B"): (32, 4096, 32, 8, 14336, 128256, 128, 5e5, 131072, False, 8_030_261_248),
    ("llama3", "70B"): (80, 8192, 64, 8, 28672, 128256, 128, 5e5, 131072, False, 70_553_706_496),
    ("llama3", "405B"): (126, 16384, 128, 8, 53248, 128256, 128, 5e5, 131072, False, 405_853_388_800),
}
FACTORS = {"llama2": None, "llama3.0": None, "llama3": 8, "llama3.1": 8, "llama3.2": 32, "llama3.3": 8}


@pytest.mark.parametrize("name, flavor", PUBLISHED)
def test_preset_is_as_published(name, flavor):
    *published, parameters = PUBLISHED[name, flavor]
    a = resolve(name, flavor)
    shape = (a.n_layers, a.dim, a.n_heads, a.n_kv_heads, a.ffn_dim, a.vocab_size, a.head_dim)
    assert (*shape, a.rope_theta, a.max_seq_len, a.tie_embeddings, parameter_count(a)) == PUBLISHED[
        name, flavor
    ]
    factor = FACTORS[name]
    assert a.rope_scaling == (factor and RopeScaling(factor, 1.0, 4.0, 8192))
    assert a.norm_eps == 1e-5


def test_every_preset_is_published_a_debugmodel_or_a_titan_spelling():
    listed = {(name, flavor) for name, flavors in PRESETS.items() for flavor in flavors}
    debug = {(name, "debugmodel") for name in FACTORS}
    titan = {
        ("llama3", f) for f in ("8B_flex", "8B_varlen", "debugmodel_flex_attn", "debugmodel_varlen_attn")
    }
    assert listed == PUBLISHED.keys() | debug | titan
    assert resolve("llama3", "8B_flex") == resolve("llama3", "8B_varlen") == resolve("llama3", "8B")


@pytest.mark.parametrize("name", FACTORS)
def test_debugmodel_has_the_familys_manner_and_the_tokenizers_vocabulary(name):
    a = resolve(name, "debugmodel", tokenizer_vocab=4096)
    assert (a.dim, a.n_layers, a.n_heads, a.n_kv_heads, a.ffn_dim) == (256, 6, 16, 16, 768)
    assert a.vocab_size == 4096
    assert resolve(name, "debugmodel", tokenizer_vocab=4096, vocab_size=5000).vocab_size == 5000
    factor = FACTORS[name]
    assert a.rope_scaling == (factor and RopeScaling(factor))
    assert a.tie_embeddings == (name == "llama3.2")


def test_only_a_debugmodel_takes_the_tokenizers_vocabulary():
    assert resolve("llama3.1", "8B", tokenizer_vocab=4096).vocab_size == 128256


def test_none_keeps_the_preset():
    assert (
        resolve("llama3.1", "8B", dim=None, tie_embeddings=None, norm_eps=None) == PRESETS["llama3.1"]["8B"]
    )


def test_what_depends_on_an_override_follows_it():
    a = resolve("llama3.1", "8B", dim=2048)
    # 1.3 x int(8 x 2048 / 3) = 7099.3, rounded up to a multiple of 1024.
    assert (a.head_dim, a.ffn_dim, a.n_kv_heads) == (64, 7168, 8)
    a = resolve("llama3.1", "8B", dim=2048, ffn_dim=5000, head_dim=128)
    assert (a.head_dim, a.ffn_dim) == (128, 5000)
    assert resolve("llama2", "7B", n_heads=64).n_kv_heads == 64
    assert resolve("llama3.1", "8B", n_heads=64).n_kv_heads == 8
    assert resolve("llama3.1", "8B", n_heads=64).head_dim == 64


def test_rope_scaling_factor():
    assert resolve("llama3.1", "8B", rope_scaling_factor=32.0).rope_scaling == RopeScaling(32.0)
    assert resolve("llama3.1", "8B", rope_scaling_factor=1).rope_scaling is None
    assert resolve("llama2", "7B", rope_scaling_factor=4).rope_scaling.original_max_seq_len == 4096
    assert resolve("llama3.0", "8B", rope_scaling_factor=8).rope_scaling == RopeScaling(8.0)


@pytest.mark.parametrize(
    "name, flavor, key, words",
    [
        ("llama5", "8B", "model.name", "llama"),
        ("llama-3.1", "8B", "model.name", "llama3.1?"),
        ("llama3_1", "8B", "model.name", "llama3.1?"),
        ("llama3.1", "8b", "model.flavor", "mean 8B?"),
        ("llama3.1", "debug_model", "model.flavor", "mean debugmodel?"),
        ("llama3", "70B_varlen_attn", "model.flavor", 'flavor = "70B" and model.attention = "varlen"'),
        ("llama3.1", "1B", "model.flavor", "1B is a flavor of llama3.2"),
        ("qwertyuiop", "8B", "model.name", "set model.name to one of them"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name, flavor, key, words):
    with pytest.raises(ConfigError) as caught:
        resolve(name, flavor)
    (problem,) = caught.value.problems
    assert problem.key == key and words in problem.fix
    assert problem.value == (name if key == "model.name" else flavor)


@pytest.mark.parametrize(
    "overrides, keys, words",
    [
        ({"dim": 250}, ["model.dim"], "model.dim = 256"),
        ({"n_heads": 15}, ["model.n_heads"], "model.n_heads = 16"),
        ({"head_dim": 15}, ["model.head_dim"], "model.head_dim = 16"),
        ({"dim": 240}, ["model.dim"], "model.dim = 256, or model.head_dim = 16"),
        ({"n_kv_heads": 3}, ["model.n_kv_heads"], "model.n_kv_heads = 2"),
        ({"n_kv_heads": 32}, ["model.n_kv_heads"], "model.n_kv_heads = 16"),
        ({"dim": 250, "n_kv_heads": 7}, ["model.dim", "model.n_kv_heads"], "or set model.head_dim"),
    ],
)
def test_inconsistent_overrides_are_refused_together(overrides, keys, words):
    with pytest.raises(ConfigError, match=words) as caught:
        resolve("llama3", "debugmodel", **overrides)
    assert [problem.key for problem in caught.value.problems] == keys


def test_a_key_that_is_not_a_field_is_a_programming_error():
    with pytest.raises(TypeError, match="colour"):
        resolve("llama2", "7B", colour=3)


def test_presets_import_no_torch():
    code = "import sys, toolkit.models.llama.args; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


_GROUPS = "must divide num_experts, which is 8, into groups of at least 2: 0, 1, 2 or 4"
MOE = MoEArgs(num_experts=8, top_k=2, ffn_dim=4, score_func="sigmoid")


@pytest.mark.parametrize(
    ("fields", "broken"),
    [
        ({"top_k": 9}, {"top_k": "must be at most num_experts, which is 8"}),
        ({"top_k": 0, "ffn_dim": -4}, dict.fromkeys(("top_k", "ffn_dim"), "must be a positive integer")),
        ({"num_experts": 8.0}, {"num_experts": "must be a positive integer"}),
        ({"num_shared_experts": -1}, {"num_shared_experts": "must be a nonnegative integer"}),
        ({"step": 0}, {"step": "must be a positive integer"}),
        ({"score_func": "tanh"}, {"score_func": 'must be "softmax" or "sigmoid"'}),
        ({"route_scale": float("nan")}, {"route_scale": "must be a positive number"}),
        (
            {"num_expert_groups": 3, "num_limited_groups": 1},
            {"num_expert_groups": _GROUPS},
        ),
        (
            {"num_expert_groups": 8, "num_limited_groups": 2},
            {"num_expert_groups": _GROUPS},
        ),
        ({"num_expert_groups": 8, "num_limited_groups": 2, "score_func": "softmax"}, {}),
        (
            {"num_expert_groups": 4, "num_limited_groups": 1, "top_k": 3},
            {"num_limited_groups": "must be 2 to 4, for top_k = 3"},
        ),
        (
            {"num_expert_groups": 4, "num_limited_groups": 5},
            {"num_limited_groups": "must be 1 to 4, for top_k = 2"},
        ),
        ({"num_limited_groups": 1}, {"num_limited_groups": "must be 0 without num_expert_groups"}),
    ],
)
def test_rules_of_experts(fields, broken):
    assert replace(MOE, **fields).broken_rules() == broken


def test_experts_of_presets_break_no_rule():
    experts = [args.moe for sizes in presets().values() for args in sizes.values() if args.moe]
    assert experts and not any(moe.broken_rules() for moe in experts)
