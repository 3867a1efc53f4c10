"""A classifier learns, says in validation what it gets right, resumes, and is handed on to transformers."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.curves import write_tokenizer
from tests.helpers import run_world
from tests.preflight.bad_runs import CPU
from tests.training import small_config, small_trainer
from toolkit.config import Config
from toolkit.errors import CheckpointError, DataError
from toolkit.generation.load import load_model
from toolkit.loss import IGNORED_LABEL
from toolkit.models.common.args import Classifier, ModelArgs
from toolkit.models.common.decoder import Decoder
from toolkit.models.on_disk import read_hf_config
from toolkit.preflight import notes
from toolkit.trainer import Trainer
from toolkit.validate import _class_scores
from toolkit.weights.convert import convert, prepare

transformers = pytest.importorskip("transformers")
judge = pytest.importorskip("sklearn.metrics")

NAMES = ["calm", "glad", "sad"]
WORDS = {"calm": "lake moss dusk", "glad": "sun dance laugh", "sad": "rain cold alone"}
OTHERS = [[*NAMES, "wild"], NAMES[::-1]]
STEPS = 24


def write_texts(file: Path, count: int) -> str:
    """Texts of one to four words, of which the last is one of the class; the first half by name."""
    chance = random.Random(count)
    rows = []
    for number in range(count):
        name = chance.choice(NAMES)
        words = [chance.choice(["red", "blue", "green"]) for _ in range(chance.randint(0, 3))]
        text = " ".join([*words, chance.choice(WORDS[name].split())])
        rows.append({"text": text, "label": name if number < count // 2 else NAMES.index(name)})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def _config(folder: Path, run: str, *, steps: int = STEPS, **tables: dict[str, Any]) -> Config:
    data = folder / "data"
    classification = {"num_labels": 3, "label_names": NAMES} | tables.pop("classification", {})
    return small_config(
        folder / run,
        model={"hf_assets_path": str(write_tokenizer(folder / "tokenizer")), "vocab_size": 512}
        | tables.pop("model", {}),
        training={
            "dataset_path": write_texts(data / "training.jsonl", 600),
            "seq_len": 48,
            "steps": steps,
        },
        validation={
            "enable": True,
            "dataset_path": write_texts(data / "validation.jsonl", 60),
            "seq_len": 32,
            "local_batch_size": 4,
            "freq": 1000,
        },
        finetune={"classification": classification} | tables.pop("finetune", {}),
        **tables,
    )


def _trained(config: Config) -> Trainer:
    trainer = small_trainer(config)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert trainer.train() == 0
    trainer.told = told.getvalue()  # type: ignore[attr-defined]
    return trainer


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        name: parameter.full_tensor().detach().clone()  # type: ignore[attr-defined]
        for name, parameter in trainer.model_parts.named_parameters()
    }


def _runs(base: str) -> dict[str, Any]:
    folder = Path(base)
    saving = {"enable": True, "interval": STEPS // 2, "last_save_in_hf": True, "export_dtype": "float32"}
    found: dict[str, Any] = {}
    whole = _trained(_config(folder, "whole", checkpoint=saving))
    found["whole"] = {"history": whole.history, "weights": _weights(whole)}
    half = f"checkpoint/step-{STEPS // 2}"
    shutil.copytree(folder / "whole" / half, folder / "halves" / half)
    resumed = _trained(_config(folder, "halves", checkpoint=saving))
    found["resumed"] = {"history": resumed.history, "weights": _weights(resumed)}

    again = _trained(_config(folder, "checkpointed", activation_checkpoint={"mode": "full"}))
    found["checkpointed"] = {"history": again.history, "weights": _weights(again)}

    # A language model, and classifiers on top of it.
    language = small_config(
        folder / "language",
        model={"hf_assets_path": str(folder / "tokenizer"), "vocab_size": 512},
        training={"dataset_path": str(folder / "data/training.jsonl"), "seq_len": 48, "steps": 1},
        checkpoint=saving,
    )
    found["language"] = _weights(_trained(language))
    dcp, hf = folder / "language/checkpoint/step-1", folder / "language/hf/step-1"
    starts = {
        "dcp": {"initial_load_path": str(dcp)},
        "hf": {"initial_load_path": str(hf), "initial_load_in_hf": True},
        "hf, by rank 0": {
            "initial_load_path": str(hf), "initial_load_in_hf": True, "initial_load_broadcast": True
        },
        "classifier": {
            "initial_load_path": str(folder / f"whole/hf/step-{STEPS}"), "initial_load_in_hf": True
        },
    }  # fmt: skip
    for name, start in starts.items():
        trainer = small_trainer(_config(folder, name, checkpoint={"enable": True, **start}))
        found[name] = _weights(trainer)
    for names in OTHERS:
        classes = {"num_labels": len(names), "label_names": names}
        start = {"enable": True, **starts["classifier"]}
        config = _config(folder, "-".join(names), classification=classes, checkpoint=start)
        found["-".join(names)] = _weights(small_trainer(config))
        start = {"enable": True, "initial_load_path": str(folder / f"whole/checkpoint/step-{STEPS}")}
        config = _config(folder, f"{names}, dcp", classification=classes, checkpoint=start)
        found["-".join(names) + ", dcp"] = _weights(small_trainer(config))
    lora = {"adapter": "lora", "lora": {"target_modules": ["all-linear"]}}
    for name in ("dcp", "hf"):
        load = saving | starts[name]
        merges = {"merge_on_export": name == "hf"}
        config = _config(folder, f"lora {name}", steps=2, finetune=lora | merges, checkpoint=load)
        trained = _trained(config)
        found[f"lora {name}"], found[f"lora {name}, told"] = _weights(trained), trained.told  # type: ignore[attr-defined]
        found[f"lora {name}, resumed"] = _weights(small_trainer(config))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classification")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Any]:
    return run_world(_runs, 1, str(folder), timeout=300)[0]


def test_a_classifier_learns_and_says_what_it_gets_right(runs: dict[str, Any]) -> None:
    last = runs["whole"]["history"][-1]
    assert last["validation_accuracy"] > 0.9 and last["validation_f1"] > 0.9


@pytest.mark.parametrize("other", ["resumed", "checkpointed"])
def test_a_resumed_or_checkpointed_classifier_is_the_same(runs: dict[str, Any], other: str) -> None:
    whole, resumed = runs["whole"], runs[other]
    for name, weight in whole["weights"].items():
        assert torch.equal(weight, resumed["weights"][name]), name
    assert whole["history"][-1]["validation_accuracy"] == resumed["history"][-1]["validation_accuracy"]


def test_transformers_reads_it_and_gives_the_same_answers(runs: dict[str, Any], folder: Path) -> None:
    """Texts of several lengths at once, padded with what config.json names, by the tokenizer beside it."""
    out = folder / f"whole/hf/step-{STEPS}"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert model.config.id2label == dict(enumerate(NAMES)) and model.config.num_labels == 3
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    rows = [json.loads(row) for row in (folder / "data/validation.jsonl").read_text().splitlines()]
    texts = [tokenizer(row["text"])["input_ids"] for row in rows]
    classes = [row["label"] if isinstance(row["label"], int) else NAMES.index(row["label"]) for row in rows]
    longest, pad = max(map(len, texts)), model.config.pad_token_id
    padded = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in texts])
    kept = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in texts])
    with torch.no_grad():
        theirs = model(padded, attention_mask=kept).logits
    loaded = Decoder(read_hf_config(out)).eval()
    loaded.load_state_dict(runs["whole"]["weights"])
    for ids, scores in zip(texts, theirs, strict=True):
        with torch.no_grad():
            ours = loaded(torch.tensor([ids]))[0, -1]
        torch.testing.assert_close(ours, scores, atol=1e-5, rtol=0)
    answers, last = theirs.argmax(-1).tolist(), runs["whole"]["history"][-1]
    assert last["validation_accuracy"] == pytest.approx(judge.accuracy_score(classes, answers))
    assert last["validation_f1"] == pytest.approx(judge.f1_score(classes, answers, average="macro"))
    loss = F.cross_entropy(theirs.double(), torch.tensor(classes)).item()
    assert last["validation_loss"] == pytest.approx(loss, rel=1e-4)


ARGS = ModelArgs(
    dim=64, n_layers=2, n_heads=8, n_kv_heads=2, ffn_dim=160, vocab_size=512, head_dim=8, rope_theta=500000.0,
    classifier=Classifier(tuple(NAMES)),
)  # fmt: skip


@pytest.mark.parametrize("start", ["dcp", "hf", "hf, by rank 0"])
def test_a_backbone_is_read_and_the_head_is_new(runs: dict[str, Any], start: str) -> None:
    language, found = runs["language"], runs[start]
    assert found.keys() == language.keys()
    head = found["output.weight"]
    assert [name for name in found if not torch.equal(found[name], language[name])] == ["output.weight"]
    assert head.shape == (3, 64) and 0.015 < head.std() < 0.025


def test_a_classifier_goes_on_from_one_of_hugging_face(runs: dict[str, Any]) -> None:
    assert all(
        torch.equal(weight, runs["whole"]["weights"][name]) for name, weight in runs["classifier"].items()
    )


@pytest.mark.parametrize("names", OTHERS)
def test_a_classifier_of_other_classes_has_a_new_head(
    runs: dict[str, Any], names: list[str], folder: Path
) -> None:
    found, whole = runs["-".join(names)], runs["whole"]["weights"]
    assert [name for name in whole if not torch.equal(found[name], whole[name])] == ["output.weight"]
    head = found["output.weight"]
    assert head.shape == (len(names), 64) and 0.015 < head.std() < 0.025
    from_checkpoint = runs["-".join(names) + ", dcp"]
    assert all(torch.equal(from_checkpoint[name], found[name]) for name in found)
    start = {"initial_load_path": str(folder / f"whole/hf/step-{STEPS}"), "initial_load_in_hf": True}
    classes = {"num_labels": len(names), "label_names": names}
    config = _config(folder, "new", classification=classes, checkpoint={"enable": True, **start})
    [told] = [note for note in notes(config, world_size=1, hardware=CPU) if "debug.seed" in note]
    assert "those of" in told and f"{NAMES[0]}, {NAMES[1]}" in told


def test_the_end_of_a_run_tells_no_perplexity_of_classes(runs: dict[str, Any]) -> None:
    [line] = [line for line in runs["lora dcp, told"].splitlines() if line.startswith("  validation loss")]
    assert "→" in line and "perplexity" not in line


def test_new_tokens_are_no_classes(runs: dict[str, Any], folder: Path) -> None:
    source = prepare("hf-to-dcp", folder / f"whole/hf/step-{STEPS}", folder / "grown", vocab_size=600).source
    shapes = {name: stored.shape for name, stored in source.tensors.items()}
    assert shapes["output.weight"] == (3, 64) and shapes["tok_embeddings.weight"] == (600, 64)


@pytest.mark.parametrize("start", ["dcp", "hf"])
def test_the_head_beside_an_adapter_is_trained_and_saved(runs: dict[str, Any], start: str) -> None:
    new, found, resumed = runs[start], runs[f"lora {start}"], runs[f"lora {start}, resumed"]
    changed = [name for name, weight in new.items() if not torch.equal(found[name], weight)]
    assert changed == ["output.weight"]
    assert all(torch.equal(weight, resumed[name]) for name, weight in found.items())


def test_an_adapter_of_a_classifier_is_handed_on(runs: dict[str, Any], folder: Path) -> None:
    """As PEFT's, merged at the end of the run, and merged afterwards: with the same scores."""
    peft = pytest.importorskip("peft")
    kind = transformers.AutoModelForSequenceClassification
    texts = torch.randint(1, 500, (1, 20))

    def scores(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(texts).logits

    expected = scores(kind.from_pretrained(folder / "lora hf/hf/step-2"))
    base = kind.from_pretrained(folder / "language/hf/step-1", num_labels=3)
    found = scores(peft.PeftModel.from_pretrained(base, str(folder / "lora dcp/hf/step-2")))
    step = folder / "lora dcp/checkpoint/step-2"
    convert(prepare("dcp-to-hf", step, folder / "merged"), verify=True)
    merged = kind.from_pretrained(folder / "merged")
    assert merged.config.id2label == dict(enumerate(NAMES))
    base = folder / "language/checkpoint/step-1"
    convert(prepare("merge", base, folder / "named", adapter=step), verify=True)
    for other in (found, scores(merged), scores(kind.from_pretrained(folder / "named"))):
        torch.testing.assert_close(other, expected, atol=1e-5, rtol=0)


def test_what_a_classifier_cannot_be_is_said(runs: dict[str, Any], folder: Path) -> None:
    step = folder / f"whole/checkpoint/step-{STEPS}"
    with pytest.raises(DataError, match="classifier with 3 classes and generates no"):
        load_model(step, device=torch.device("cpu"), dtype=torch.float32)
    beside, language = folder / "lora dcp/checkpoint/step-2", folder / "language/checkpoint/step-1"
    with pytest.raises(DataError, match=r"trained with classifier(.|\n)*fix: .*convert merge"):
        load_model(language, device=torch.device("cpu"), dtype=torch.float32, adapters={"a": beside})
    with pytest.raises((DataError, CheckpointError), match="Meta's format does not support"):
        prepare("dcp-to-meta", step, folder / "meta")
    convert(prepare("dcp-to-hf", step, folder / "converted"), verify=True)
    written = json.loads((folder / "converted/config.json").read_text())
    assert written["architectures"] == ["LlamaForSequenceClassification"]


def test_documents_of_a_row_score_as_they_do_alone() -> None:
    torch.manual_seed(0)
    model = Decoder(ARGS).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    texts = [torch.randint(512, (n,)) for n in (3, 5, 2)]
    labels = torch.full((1, 12), IGNORED_LABEL)
    labels[0, [2, 7, 9]] = torch.tensor([2, 0, 1])
    row = torch.cat([*texts, torch.zeros(2, dtype=torch.int64)])[None]
    documents = torch.tensor([[0] * 3 + [1] * 5 + [2] * 2 + [-1] * 2])
    positions = torch.tensor([[*range(3), *range(5), *range(2), 0, 0]])
    packed = model(row, positions=positions, documents=documents, labels=labels)
    alone = sum(
        F.cross_entropy(model(text[None])[0, -1:], torch.tensor([label]), reduction="sum")
        for text, label in zip(texts, (2, 0, 1), strict=True)
    )
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=0)


def test_scores_are_those_of_scikit_learn() -> None:
    """With a class that nothing has or is taken for, one that is only answered, one that is never."""
    truth, answers = [0, 0, 1, 1, 1, 3], [0, 1, 1, 1, 2, 2]
    counts = torch.zeros(3, 5, dtype=torch.int64)
    for label, answer in zip(truth, answers, strict=True):
        counts[0, label] += label == answer
        counts[1, answer] += 1
        counts[2, label] += 1
    assert _class_scores(counts) == {
        "validation_accuracy": pytest.approx(judge.accuracy_score(truth, answers)),
        "validation_f1": pytest.approx(judge.f1_score(truth, answers, average="macro", zero_division=0)),
    }
