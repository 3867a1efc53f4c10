"""Our adapter for lm-eval against lm-eval's own adapter to transformers, on the same model and tasks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evaluation.task_files import write_task
from tests.helpers import run_world
from toolkit.cli import run_command
from toolkit.errors import EXIT_CONFIG, EXIT_DATA, ConfigError, DataError

pytest.importorskip("lm_eval", reason="the extra eval is not installed")
pytestmark = pytest.mark.skipif("TOOLKIT_ASSETS" not in os.environ, reason="TOOLKIT_ASSETS is not set")
MODEL = Path(os.environ.get("TOOLKIT_ASSETS", ""), "stories15M", "hf")

CHOICES = [
    ("Once upon a time, there was a little girl named", [" Lily.", " Tax.", " Max and he liked"], 0),
    ("Tom had a red ball. He liked to", [" play with it.", " eat the sky.", " invoice"], 0),
    ("The sun was hot, so they went to swim in the", [" car.", " lake.", " pool. "], 1),
    ("", ["Once upon a time", "Notwithstanding the foregoing"], 0),
    ("The cat said: ", ["meow", "hello, I am a cat"], 1),
]
TEXTS = [
    "One day, a boy named Tim went to the park. He saw a big dog.\nThe dog was very happy.",
    "Mia had a toy. " * 90,  # longer than the model's context
]
PROMPTS = [
    "Once upon a time",
    "Lily and Ben",
    "The dog was sad because he",
    "One day, Tim found a key. The key",
]
GENERATION = {"until": [".", "\n\n"], "max_gen_toks": 24}


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Any]:
    """lm-eval's adapters with transformers' model, by whether texts begin with BOS."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, LlamaTokenizer

    copy = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(MODEL / "tokenizer.model", copy)
    tokenizer = LlamaTokenizer.from_pretrained(copy, legacy=True, add_bos_token=True)
    tokenizer.pad_token = tokenizer.unk_token
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    # Its cache of logits mixes up windows of one text, at least in lm-eval 0.4.13.
    options = {"tokenizer": tokenizer, "device": "cpu", "batch_size": 2, "logits_cache": False}
    return {bos: HFLM(model, add_bos_token=bos, **options) for bos in (True, False)}


def task_model(add_bos: bool | None = None, eos_ids: tuple[int, ...] = ()) -> Any:
    from toolkit.evaluation.lm_eval import TaskModel
    from toolkit.evaluation.perplexity import Evaluator
    from toolkit.generation.load import load_model, require_tokenizer

    loaded = load_model(MODEL, device=torch.device("cpu"), dtype=torch.float32, add_bos=add_bos)
    evaluator = Evaluator(loaded.model, batch_size=3, mesh=loaded.mesh)
    tokenizer, length = require_tokenizer(loaded), loaded.args.max_seq_len
    return TaskModel(evaluator, loaded.generator(), tokenizer, length=length, eos_ids=eos_ids)


@pytest.fixture(scope="module")
def ours() -> Any:
    return task_model()


def requests(kind: str, arguments: list[tuple]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=index) for index, each in enumerate(arguments)
    ]


def test_continuations(judges: dict[bool, Any], ours: Any) -> None:
    pairs = [(context, choice) for context, choices, _ in CHOICES for choice in choices]
    pairs.append((TEXTS[1].strip(), " She was"))  # whose beginning does not fit
    asked = requests("loglikelihood", pairs)
    expected, found = judges[True].loglikelihood(asked), ours.loglikelihood(asked)
    assert len({greedy for _, greedy in expected}) == 2
    for pair, (ours_is, ours_greedy), (theirs, greedy) in zip(pairs, found, expected, strict=True):
        assert (ours_is, ours_greedy) == (pytest.approx(theirs, abs=1e-4), greedy), pair


def test_whole_texts(judges: dict[bool, Any], ours: Any) -> None:
    asked = requests("loglikelihood_rolling", [(text,) for text in TEXTS])
    # With add_bos_token that adapter would begin with two BOS.
    assert ours.loglikelihood_rolling(asked) == pytest.approx(
        judges[False].loglikelihood_rolling(asked), abs=1e-3
    )


def test_generated_texts(judges: dict[bool, Any], ours: Any) -> None:
    wishes = [GENERATION, GENERATION, {"until": "Lily", "max_gen_toks": 40}, GENERATION]
    asked = requests("generate_until", list(zip(PROMPTS, wishes, strict=True)))
    expected, found = judges[True].generate_until(asked), ours.generate_until(asked)
    assert found == expected
    assert all(expected) and not any("." in text for text in expected[:2])
    with pytest.raises(DataError, match="256 new tokens"):
        ours.generate_until(requests("generate_until", [("a", {"until": ["b"]})]))


def test_generated_texts_end_where_generation_config_says(
    judges: dict[bool, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = 29889  # "."
    monkeypatch.setattr(judges[True].model.generation_config, "eos_token_id", [2, stop])
    asked = requests("generate_until", [(prompt, {"until": [], "max_gen_toks": 40}) for prompt in PROMPTS])
    found = task_model(eos_ids=(2, stop)).generate_until(asked)
    assert found == judges[True].generate_until(asked)
    assert any(text.endswith(".") for text in found)


def test_generation_kwargs(judges: dict[bool, Any], ours: Any) -> None:
    """A setting that changes a text acts or is refused; null and one that changes nothing count as absent."""
    common = {"until": [], "max_gen_toks": 12}
    acting = {"repetition_penalty": 1.5, "num_beams": 1, "no_repeat_ngram_size": 0}
    asked = requests("generate_until", [(PROMPTS[0], common | acting)])
    assert ours.generate_until(asked) == judges[True].generate_until(asked)
    asked = requests("generate_until", [(PROMPTS[0], common)])
    unset = requests("generate_until", [(PROMPTS[0], common | {"until": None, "top_k": None})])
    assert ours.generate_until(unset) == ours.generate_until(asked)
    for refused in (
        {"num_beams": 4},
        {"no_repeat_ngram_size": 2},
        {"max_length": 12},
        {"do_sample": True, "temprature": 0.7},
        {"do_sample": True},
    ):
        name, value = list(refused.items())[-1]
        with pytest.raises(DataError, match=f"generation_kwargs: {name} = {value} "):
            ours.generate_until(requests("generate_until", [(PROMPTS[0], common | refused)]))


def test_texts_are_drawn_among_as_many_tokens_as_by_transformers(
    ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GenerationConfig

    drawn = []
    generate = ours._generator.generate
    monkeypatch.setattr(
        ours._generator,
        "generate",
        lambda *args, sampling, **options: drawn.append(sampling) or generate(*args, **options),
    )
    wishes = {"until": [], "max_gen_toks": 2, "do_sample": True, "temperature": 0.7}
    ours.generate_until(requests("generate_until", [(PROMPTS[0], wishes)]))
    [sampling] = drawn
    assert sampling.top_k == GenerationConfig()._get_default_generation_params()["top_k"]


def test_a_tokenizer_that_adds_no_bos(judges: dict[bool, Any]) -> None:
    """As SmolLM2's: contexts begin with their own first token, and what has no context follows BOS."""
    ours = task_model(add_bos=False)
    pairs = requests("loglikelihood", [(context, choices[0]) for context, choices, _ in CHOICES])
    expected = [found for found, _ in judges[False].loglikelihood(pairs)]
    assert [found for found, _ in ours.loglikelihood(pairs)] == pytest.approx(expected, abs=1e-4)
    whole = requests("loglikelihood_rolling", [(text,) for text in TEXTS])
    assert ours.loglikelihood_rolling(whole) == pytest.approx(
        judges[False].loglikelihood_rolling(whole), abs=1e-3
    )
    texts = requests("generate_until", [(prompt, GENERATION) for prompt in PROMPTS])
    assert ours.generate_until(texts) == judges[False].generate_until(texts)


def test_sampled_texts_are_seeded(ours: Any) -> None:
    wishes = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0, "top_k": 50}
    asked = requests("generate_until", [(PROMPTS[0], wishes)] * 2)
    assert ours.generate_until(asked) == ours.generate_until(asked)
    greedy = requests("generate_until", [(PROMPTS[0], {"until": [], "max_gen_toks": 12})])
    assert ours.generate_until(asked)[:1] != ours.generate_until(greedy)


def write_tasks(folder: Path) -> None:
    write_task(
        folder,
        "tiny_choices",
        [
            {"context": context, "choices": choices, "label": label}
            for context, choices, label in CHOICES
            if context
        ],
        output_type="multiple_choice",
        doc_to_text="{{context}}",
        doc_to_choice="{{choices}}",
        doc_to_target="{{label}}",
        target_delimiter="",
        metrics="acc acc_norm",
    )
    write_task(
        folder,
        "tiny_names",
        [{"prompt": prompt, "answer": "Lily"} for prompt in PROMPTS],
        output_type="generate_until",
        doc_to_text="{{prompt}}",
        doc_to_target="{{answer}}",
        generation_kwargs=GENERATION,
        filter_list=[
            {
                "name": "name",
                "filter": [{"function": "regex", "regex_pattern": "(Lily)"}, {"function": "take_first"}],
            }
        ],
        metrics="exact_match",
    )


def _results(names: list[str], folder: str) -> Any:
    import lm_eval.evaluator

    from toolkit.evaluation.lm_eval import load_tasks, run_tasks

    lm_eval.evaluator.add_env_info = lambda results: None
    found = run_tasks(task_model(), load_tasks(names, folder=Path(folder)), few_shot=1)
    return found and found["results"]


@pytest.mark.exhaustive  # each rank imports lm-eval
def test_ranks_that_share_the_rows_come_to_the_same(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    names = ["tiny_choices", "tiny_names"]
    expected = _results(names, str(tmp_path))
    on_first, on_other = run_world(_results, 2, names, str(tmp_path))
    assert on_other is None
    assert {name: on_first[name] for name in names} == {name: expected[name] for name in names}


def test_local_tasks_from_end_to_end(
    judges: dict[bool, Any], ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from toolkit.evaluation.lm_eval import load_tasks, result_lines, run_tasks

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    # It would list this machine's packages and graphics drivers for its log.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    write_tasks(tmp_path)
    names = ["tiny_choices", "tiny_names"]
    found = run_tasks(ours, load_tasks(names, folder=tmp_path), few_shot=1)["results"]
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    expected = simple_evaluate(
        judges[True],
        tasks=names,
        num_fewshot=1,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=1000,
    )["results"]
    assert {name: found[name] for name in names} == {name: expected[name] for name in names}
    assert 0 < found["tiny_choices"]["acc,none"] < 1
    lines = list(result_lines({"results": found}))
    assert [line.split()[:2] for line in lines] == [
        ["tiny_choices", "acc"],
        ["tiny_choices", "acc_norm"],
        ["tiny_names", "exact_match"],
    ]
    assert f"{found['tiny_choices']['acc,none']:.4f} ± " in lines[0]
    monkeypatch.setattr("toolkit.evaluation.lm_eval.TaskManager", lambda **_: manager)
    with pytest.raises(ConfigError, match="did you mean tiny_choices"):
        load_tasks(["tiny_choice"], folder=tmp_path)


def test_mistakes_of_tasks_are_told_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_tasks(tmp_path)
    (tmp_path / "tiny_choices.jsonl").unlink()
    task = (tmp_path / "tiny_names.yaml").read_text()
    (tmp_path / "tiny_names.yaml").write_text(task.replace("max_gen_toks: 24", "num_beams: 4"))

    def told(*words: str) -> tuple[int, str]:
        return run_command("evaluate", ["no model", *words]), capsys.readouterr().err

    folder = ("--task-folder", str(tmp_path))
    code, error = told("--tasks", "tiny_choices", *folder)
    assert code == EXIT_DATA and "the task tiny_choices cannot be run" in error and "Traceback" not in error
    code, error = told("--tasks", "tiny_names", *folder)
    assert (
        code == EXIT_DATA and "the task tiny_names cannot be run: generation_kwargs: num_beams = 4" in error
    )
    (tmp_path / "tiny_names.yaml").write_text(f"{task}unsafe_code: true\n")
    code, error = told("--tasks", "tiny_names", *folder)
    assert code == EXIT_DATA and "it executes code written by the model" in error
    code, error = told("--tasks", "tiny_names", "--task-folder", str(tmp_path / "none"))
    assert code == EXIT_CONFIG and "--task-folder" in error


def test_a_group_is_one_result_beside_its_tasks(
    ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.evaluation.lm_eval import load_tasks, run_tasks

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    write_tasks(tmp_path)
    group = "group: tiny\ntask: [tiny_choices]\naggregate_metric_list: [{metric: acc}]\n"
    (tmp_path / "tiny.yaml").write_text(group)
    found = run_tasks(ours, load_tasks(["tiny"], folder=tmp_path), limit=2)["results"]
    assert found["tiny"]["acc,none"] == found["tiny_choices"]["acc,none"]


def test_examples_that_a_task_cannot_be_run_with_are_told(
    ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.evaluation.lm_eval import load_tasks, run_tasks

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_tasks(tmp_path)
    tasks = load_tasks(["tiny_names"], folder=tmp_path)
    with pytest.raises(DataError, match=f"smaller --few-shot.*at most {len(PROMPTS)} examples"):
        run_tasks(ours, tasks, few_shot=len(PROMPTS))
