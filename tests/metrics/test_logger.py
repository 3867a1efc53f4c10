import errno
import io
import json
import math
import mmap
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from toolkit.config.job import Metrics
from toolkit.io import standard_streams
from toolkit.metrics.jsonl import rank_files
from toolkit.metrics.logger import MetricLogger
from toolkit.metrics.memory import memory_usage

_OPTIONS = Metrics()


def _events(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def _run(folder, steps, *, scale=1.0, options=_OPTIONS, **about):
    logger = MetricLogger(options, folder, total_steps=100, **about)
    for step in steps:
        logger.log(
            step, {"loss": scale * step, "lr": 0.1, "tokens": 10 * step, "mfu": None, "memory_gib": 1.5}
        )
    logger.log(steps[-1], {"validation_loss": scale * 7.0, "validation_seconds": 2.0})
    logger.close()


def _scalars(events, tag):
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_reads_the_events(tmp_path):
    _run(tmp_path, [1, 2, 3], config_text='[training]\nsteps = 3 # "x"')
    events = _events(tmp_path / "tb")
    assert set(events.Tags()["scalars"]) == {
        "train/loss",
        "train/lr",
        "train/tokens",
        "memory/gib",
        "validation/loss",
        "speed/validation_seconds",
    }
    assert _scalars(events, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert _scalars(events, "validation/loss") == [(3, 7.0)]
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == '    [training]\n    steps = 3 # "x"'


def test_a_heat_map_is_an_image_of_tensorboard(tmp_path):
    logger = MetricLogger(_OPTIONS, tmp_path, total_steps=9)
    logger.draw(3, "moe/load", np.array([[1.0, 8.0, 0.0], [2.0, 0.5, 4.0]]))
    logger.close()
    [image] = _events(tmp_path / "tb").Images("train/moe/load")
    pixels = np.asarray(Image.open(io.BytesIO(image.encoded_image_string)))
    assert image.step == 3 and pixels.shape == (16, 24, 3)
    red, blue = [255, 0, 0], [0, 0, 255]
    assert pixels[::8, ::8].tolist() == [[[255] * 3, red, blue], [[255, 128, 128], [128, 128, 255], red]]
    assert (pixels == pixels[::8, ::8].repeat(8, 0).repeat(8, 1)).all()


def test_a_resumed_run_shows_each_step_once_everywhere(tmp_path):
    _run(tmp_path, [1, 2, 3, 4, 5])
    _run(tmp_path, [3, 4], resume_step=2, scale=10.0)
    expected = [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
    assert _scalars(_events(tmp_path / "tb"), "train/loss") == expected
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in records if "loss" in r] == expected
    assert [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r] == [(4, 70.0)]


def test_a_new_run_in_the_same_folder_hides_the_old_one(tmp_path):
    _run(tmp_path, [1, 2, 3])
    _run(tmp_path, [1, 2], scale=10.0)
    assert _scalars(_events(tmp_path / "tb"), "train/loss") == [(1, 10.0), (2, 20.0)]


def test_a_new_run_sets_files_of_ranks_that_it_has_not_aside(tmp_path):
    one, all_ranks = (Metrics(enable_tensorboard=False, save_for_all_ranks=asked) for asked in (False, True))
    for rank in range(3):
        _run(tmp_path, [1], options=all_ranks, rank=rank, world_size=3)
    _run(tmp_path, [2], options=one, resume_step=1)
    assert sorted(rank_files(tmp_path)) == [1, 2]
    _run(tmp_path, [1], options=all_ranks, world_size=2)
    assert sorted(rank_files(tmp_path)) == [1]
    _run(tmp_path, [1], options=one, world_size=2)
    assert rank_files(tmp_path) == {}
    assert all((tmp_path / f"metrics.rank-{rank}.previous.jsonl").exists() for rank in (1, 2))


def test_tensorboard_can_be_off_or_elsewhere(tmp_path, monkeypatch):
    _run(tmp_path / "off", [1], options=Metrics(enable_tensorboard=False))
    assert [path.name for path in (tmp_path / "off").iterdir()] == ["metrics.jsonl"]
    _run(tmp_path / "on", [1], options=Metrics(save_tb_folder="events"))
    assert _scalars(_events(tmp_path / "on" / "events"), "train/loss") == [(1, 1.0)]
    monkeypatch.setenv("HOME", str(tmp_path))
    _run(tmp_path / "home", [1], options=Metrics(save_tb_folder="~/events"))
    assert _scalars(_events(tmp_path / "events"), "train/loss") == [(1, 1.0)]


def test_other_ranks_are_silent_unless_asked(tmp_path, capsys):
    _run(tmp_path, [1], rank=3)
    assert list(tmp_path.iterdir()) == []
    _run(tmp_path, [1], rank=3, options=Metrics(save_for_all_ranks=True))
    assert capsys.readouterr().out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.rank-3.jsonl", "tb"]
    assert _scalars(_events(tmp_path / "tb" / "rank-3"), "train/loss") == [(1, 1.0)]


def test_a_loss_that_is_not_a_number_reaches_console_and_files(tmp_path, capsys):
    logger = MetricLogger(_OPTIONS, tmp_path, total_steps=10)
    logger.log(1, {"loss": math.nan})
    logger.close()
    assert "loss nan" in capsys.readouterr().out
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": None}
    assert math.isnan(_scalars(_events(tmp_path / "tb"), "train/loss")[0][1])


def test_files_that_cannot_be_written_are_told_once(tmp_path, capsys):
    (tmp_path / "file").touch()
    _run(tmp_path / "file", [1, 2])
    out = capsys.readouterr().out
    assert out.count("metrics.jsonl cannot be written") == 1
    assert out.count("TensorBoard's events cannot be written") == 1
    assert "loss 2.0000" in out


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fault", ["full disk", "deleted folder"])
def test_a_writer_of_tensorboard_that_fails_is_told_without_a_traceback(fault, tmp_path, capsys, monkeypatch):
    logger = MetricLogger(_OPTIONS, tmp_path, total_steps=100)
    logger.log(1, {"loss": 1.0})
    if fault == "full disk":
        monkeypatch.setattr(RecordWriter, "write", _full)
    else:
        shutil.rmtree(tmp_path / "tb")
    for step in (2, 3, 4):
        logger.log(step, {"loss": float(step)})
    logger.close()
    captured = capsys.readouterr()
    assert captured.out.count("TensorBoard's events cannot be written: [Errno") == 1
    assert captured.err == ""
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def _full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_lost_console_is_told_once_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(standard_streams, "lost", lambda: "standard output cannot be written: broken")
    _run(tmp_path, [1, 2])
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record.get("console_lost") for record in records] == [standard_streams.lost(), None, None]


def test_memory_on_cpu_is_what_is_resident():
    before = memory_usage(torch.device("cpu"))["memory_gib"]
    block = mmap.mmap(-1, 2**28)  # not from the heap, which may have as much to give again
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    after = memory_usage(torch.device("cpu"))
    assert after["memory_gib"] - before == pytest.approx(0.25, abs=0.05)
    assert after["memory_peak_gib"] >= after["memory_gib"]
    del block


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_on_cuda_is_the_peak_since_the_last_call():
    device = torch.device("cuda")
    memory_usage(device)
    block = torch.ones(2**28, device=device)  # 1 GiB
    del block
    assert memory_usage(device)["memory_gib"] >= 1.0
    assert memory_usage(device)["memory_gib"] < 1.0
