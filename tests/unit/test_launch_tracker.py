"""What W&B gets, read back from the file that an offline run writes."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest

from evals.report.sources import read_path
from evals.report.wandb_file import BLOCK, read_records, read_wandb
from launch.tracker import WandbRun, with_axes

pytest.importorskip("wandb", reason="wandb is not installed")

CONFIG = {
    "git_commit": "a" * 40,
    "git_dirty": False,
    "params": 123,
    "deepspeed": {"optimizer": {"type": "SCAPE", "params": {"sparsity": 0.99, "lr": 1e-3}}},
}
STEPS = 300  # enough for several blocks of the file


def record(step: int) -> dict:
    row = {"step": step, "loss": 5.0 / step, "tokens": 64 * step, "wall_s": step / 8, "bytes_cumulative": 1000.0 * step}
    row |= {"grad_norm": None, "scape/sparsity": 0.99, "scape/bytes_total": 1000.0, "scape/ms_reduce": 1.5}
    if step % 100 == 0:
        row |= {"val_loss": 6.0 / step, "scape/residual_norm": 2.0, "scape/mask_overlap": 0.5}
        row |= {"scape/visits_hist_0": 0.25, "scape/visits_hist_1": 0.5, "scape/visits_hist_2": 0.25}
    return row


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.delenv("WANDB_DIR", raising=False)
        run = WandbRun(folder, project="p", name="scape99", group="experiment", config=CONFIG, resume=False)
        for step in range(1, STEPS + 1):
            run.log(record(step))
        run.finish({"steps": STEPS, "final_val_loss": 0.02, "diverged": False})
    (log,) = folder.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 60
    while not read_wandb(log).finished and time.monotonic() < deadline:  # wandb's own process may still be writing
        time.sleep(0.1)
    return log


def test_an_offline_run_holds_what_was_logged(offline: Path) -> None:
    assert offline.stat().st_size > BLOCK
    log = read_wandb(offline)
    assert (log.name, log.group, log.job_type, log.finished) == ("scape99", "experiment", "SCAPE", True)
    assert {k: v for k, v in log.config.items() if k != "_wandb"} == CONFIG
    assert [row["_step"] for row in log.history] == list(range(1, STEPS + 1))
    for row in log.history:
        for key, value in record(row["_step"]).items():
            if value is not None and key != "step" and "visits_hist" not in key:
                assert row[key] == pytest.approx(value), key
    assert log.summary["steps"] == STEPS and log.summary["final_val_loss"] == 0.02


def test_losses_have_every_axis(offline: Path) -> None:
    log = read_wandb(offline)
    axes = {"by_tokens/*": "tokens", "by_wall_s/*": "wall_s", "by_bytes/*": "bytes_cumulative"}
    assert {k: v for k, v in log.metrics.items() if v} == axes
    last = log.history[-1]
    for prefix in ("by_tokens", "by_wall_s", "by_bytes"):
        assert last[f"{prefix}/loss"] == last["loss"] and last[f"{prefix}/val_loss"] == last["val_loss"]
    assert "by_tokens/val_loss" not in log.history[0]


def test_the_report_reads_it_as_it_reads_metrics(offline: Path) -> None:
    (run,) = read_path(offline.parent)
    assert run.method == "SCAPE 99%" and run.steps == STEPS and run.notes == []
    assert run.points("val_loss", "bytes_cumulative") == ([1e5, 2e5, 3e5], pytest.approx([0.06, 0.03, 0.02]))
    assert run.visit_bins() == ([0, 1, 2], [0.25, 0.5, 0.25])


@pytest.mark.parametrize("cut", [1, 5000, BLOCK + 3])
def test_a_killed_run_is_read_as_far_as_it_came(offline: Path, tmp_path: Path, cut: int) -> None:
    data = offline.read_bytes()
    short = tmp_path / "run-x.wandb"
    short.write_bytes(data[:-cut])
    whole, left = list(read_records(offline)), list(read_records(short))
    assert 0 < len(left) < len(whole) and left == whole[: len(left)]
    (run,) = read_path(short)
    assert "still running or was killed" in run.notes[0]


@pytest.mark.parametrize("left", range(8))
def test_a_block_that_ends_in_padding(tmp_path: Path, left: int) -> None:
    """Where fewer than 7 bytes of a block are left no record begins; with exactly 7, an empty first piece may."""
    first = b"a" * (BLOCK - 7 - 7 - left)  # the file's header, the record's, and what is left of the block
    data = b":W&B\xe1\xbe\x00" + struct.pack("<IHB", 0, len(first), 1) + first
    data += struct.pack("<IHB", 0, 0, 2) if left == 7 else b"\0" * left
    data += struct.pack("<IHB", 0, 1, 4 if left == 7 else 1) + b"b"
    (tmp_path / "x.wandb").write_bytes(data)
    assert list(read_records(tmp_path / "x.wandb")) == [first, b"b"]


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.wandb").write_text("hello")
    with pytest.raises(ValueError, match=r"x\.wandb: not a \.wandb file"):
        read_path(tmp_path / "x.wandb")


def test_without_a_number_nothing_is_sent() -> None:
    assert with_axes({"step": 3, "loss": None, "grad_norm": None, "tokens": 4}) == {"tokens": 4}
