"""Runs that break the rules of ``rules.mixture``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.preflight.bad_runs import Bad, bad, save, write

CODE, WEB = "data.mixture.code", "data.mixture.web"
BOTH = f"{CODE}.weight=1 {WEB}.weight=3 {WEB}.dataset=embedded_validation"


def _saved(**loader: Any) -> Any:
    return lambda folder: save(folder, 5, loader=loader)


def _two_files(folder: Path) -> None:
    write("a.jsonl", '{"text": "x", "body": "y"}\n')(folder)


CASES: list[Bad] = [
    bad(
        "mixture_or_dataset",
        f"training.dataset=embedded {CODE}.weight=1",
        "replaced by the corpora",
        'set dataset = "c4_test", the default',
    ),
    bad(
        "mixture_or_dataset",
        "training.dataset=c4_test job.config_file=run.toml",  # the default, over the mixture of the file
        "replaced by the corpora",
        prepare=write("run.toml", "[data.mixture.code]\nweight = 1\n"),
    ),
    bad(
        "mixture_or_dataset",
        f"training.dataset_path=a.txt {CODE}.weight=1",
        "to train on it as well",
        'dataset_path = "None"',
        prepare=write("a.txt", "x"),
    ),
    bad(
        "mixture_or_dataset",
        f"job.config_file=base.toml {CODE}.dataset=embedded_validation training.dataset=embedded",
        "replaced by the corpora",
        key="training.dataset",
        prepare=write("base.toml", "[data.mixture.code]\nweight = 1\n"),
    ),
    bad(
        "mixture_or_dataset",
        "job.config_file=run.toml",
        "replaced by the corpora",
        key="training.dataset",
        prepare=lambda folder: (
            write("base.toml", "[data.mixture.code]\nweight = 1\n")(folder),
            write("run.toml", 'extends = "base.toml"\n[training]\ndataset = "embedded"\n')(folder),
        ),
    ),
    bad(
        "mixture_or_dataset",
        "job.config_file=run.toml",
        "replaced by the corpora",
        key="training.dataset",
        prepare=write("run.toml", '[training]\ndataset = "embedded"\n[data.mixture.code]\nweight = 1\n'),
    ),
    bad(
        "mixture_weights_fit",
        f"{CODE}.weight=0.0004 {WEB}.weight=5 {WEB}.dataset=embedded_validation",
        "less than 1 / 10,000 of all weights",
        "data.mixture.code.weight to at least 0.0005",
    ),
    bad(
        "mixture_parts_differ",
        f"{WEB}.dataset=c4_test {CODE}.dataset=embedded",
        "[data.mixture.code] has the same text",
        key=f"{WEB}.dataset",
    ),
    bad(
        "mixture_parts_differ",
        f"{WEB}.dataset_path=a.jsonl {CODE}.dataset_path=a.jsonl {CODE}.text_column=text",
        "[data.mixture.code] has the same text",
        key=f"{WEB}.dataset_path",
        prepare=_two_files,
    ),
    bad("corpus_readable", f"{CODE}.dataset=c5", "embedded"),
    bad("corpus_readable", f"{CODE}.dataset_path=none.txt", "no such file"),
    bad(
        "corpus_readable",
        f"{CODE}.dataset_path=a.jsonl {CODE}.text_column=txt",
        "'body'",
        key=f"{CODE}.text_column",
        prepare=_two_files,
    ),
    bad(
        "corpus_readable",
        f"{CODE}.dataset_path=a.jsonl data.text_column=txt",
        "'body'",
        f"set {CODE}.text_column, or data.text_column",
        key="data.text_column",
        prepare=_two_files,
    ),
    bad(
        "mixture_resumable",
        f"{BOTH} checkpoint.enable",
        "counted with one corpus, and this run has mixture of code, web",
        "exclude_from_loading",
        prepare=_saved(corpus="8a2f"),
    ),
    bad(
        "mixture_resumable",
        "checkpoint.enable",
        "counted with mixture of code, web, and this run has one corpus",
        key="training.dataset",
        prepare=_saved(corpus="mixture of code, web"),
    ),
    bad(
        "mixture_resumable",
        f"{CODE}.weight=1 {CODE}.dataset=embedded_validation checkpoint.enable",
        "counted with mixture of code, web, and this run has mixture of code",
        prepare=_saved(corpus="mixture of code, web"),
    ),
    bad(
        "mixture_resumable",
        f"{BOTH} checkpoint.enable",
        "a share of 20%, now it is 25%",
        prepare=_saved(**{"corpus": "mixture of code, web", "code.share": "20%", "web.share": "75%"}),
    ),
]
