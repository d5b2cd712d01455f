"""The main job under the real launcher: records, exact resume, W&B offline, local `datasets` data, bad arguments."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from evals.downstream.__main__ import parse
from evals.downstream.checkpoints import find, load_model, load_tokenizer
from evals.report.wandb_file import read_wandb
from launch.metrics import read_metrics
from launch.ports import free_port
from tests.launch import ROOT, extensions_dir, kill_tagged

pytestmark = pytest.mark.dist


def pretrain(output: Path, *args: object, config: str = "zero2_scape90_fp32", module: bool = False) -> Any:
    """One 2-rank run of the tiny model; returns the finished process."""
    launcher = [sys.executable, str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2"]
    launcher += ["--master_port", str(free_port()), *(["--module", "deepspeed_scape.run"] if module else [])]
    job = ["launch/pretrain.py", "--deepspeed_config", f"ds_configs/{config}.json", "--preset", "tiny"]
    job += ["--eval-batches", "2", "--log-every", "1", "--output", str(output), *map(str, args)]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(output),
        "PYTHONPATH": str(ROOT),
        "TORCH_EXTENSIONS_DIR": extensions_dir(),
        "SCAPE_TEST_TAG": (tag := uuid.uuid4().hex),
    }
    try:
        return subprocess.run(launcher + job, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    finally:
        kill_tagged(tag)  # past the timeout only the launcher has been ended, not what it has started


def losses(path: Path) -> dict[int, tuple[float, float | None]]:
    _, steps, _ = read_metrics(path / "metrics.jsonl")
    return {s["step"]: (s["loss"], s.get("val_loss")) for s in steps}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local data set in the form that `datasets` reads, and where the runs go."""
    folder = tmp_path_factory.mktemp("pretrain")
    data = folder / "data"
    data.mkdir()
    words = ["the", "ranks", "send", "what", "they", "must", "and", "keep", "the", "rest", "for", "a", "better", "day"]
    for split, count in (("train", 400), ("validation", 40)):
        lines = [json.dumps({"text": " ".join(words[(i * j) % 14] for j in range(60))}) for i in range(1, count)]
        (data / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Any]:
    common = [
        "--data",
        f"hf:{folder / 'data'}",
        "--cache-dir",
        folder / "cache",
        "--seed",
        7,
        "--lr-schedule",
        "cosine",
    ]
    common += ["--set", "gradient_accumulation_steps=2", "--set", "optimizer.params.warmup_steps=0"]
    common += ["--lr-warmup", 3, "--eval-every", 5]
    more = ["--save-every", 5, "--wandb", "--diagnose-every", 4]
    done = {"whole": pretrain(folder / "whole", *common, "--steps", 10, *more)}
    # the schedule runs to --steps, so the first half is the same run as if it had been killed after its save at 5
    shutil.copytree(folder / "whole", folder / "halves", ignore=shutil.ignore_patterns("wandb"))
    (folder / "halves" / "checkpoints" / "latest").write_text("step5")
    done["second"] = pretrain(folder / "halves", *common, "--steps", 10, "--save-every", 10, module=True)
    return done


def test_runs_finish(runs: dict[str, Any]) -> None:
    for name, process in runs.items():
        assert process.returncode == 0, f"{name}\n{process.stdout[-3000:]}\n{process.stderr[-3000:]}"


def test_records_are_whole(folder: Path, runs: dict[str, Any]) -> None:
    config, steps, summary = read_metrics(folder / "whole" / "metrics.jsonl")
    assert config["git_commit"] is None or len(config["git_commit"]) == 40
    assert [s["step"] for s in steps] == list(range(1, 11))
    assert [s["step"] for s in steps if "val_loss" in s] == [5, 10]
    assert summary is not None and summary["world_size"] == 2 and summary["steps"] == 10
    for step in steps[1:]:  # the first makes its own mask
        assert step["bytes_sent"] == pytest.approx(step["scape/bytes_total"])
        assert step["grad_norm"] <= step["scape/grad_norm_rms"] * (1 + 1e-6)


def test_resume_is_exact_even_in_a_new_launch_through_run(folder: Path, runs: dict[str, Any]) -> None:
    whole, halves = losses(folder / "whole"), losses(folder / "halves")
    assert halves == whole
    resumed = [json.loads(line) for line in (folder / "halves" / "metrics.jsonl").read_text().splitlines()]
    assert [r["resumed_from"] for r in resumed if r["kind"] == "config" and r.get("resumed_from")] == [5]


def test_wandb_keeps_an_offline_run(folder: Path, runs: dict[str, Any]) -> None:
    logs = list(folder.glob("whole/wandb/offline-run-*/*.wandb"))
    assert len(logs) == 1, runs["whole"].stdout[-2000:]
    assert not (folder / "halves" / "wandb").exists()  # only when asked for
    log, (config, steps, summary) = read_wandb(logs[0]), read_metrics(folder / "whole" / "metrics.jsonl")
    assert log.group == folder.name and log.job_type == "SCAPE" and log.finished
    assert log.config["git_commit"] == config["git_commit"] and log.config["deepspeed"] == config["deepspeed"]
    for row, step in zip(log.history, steps, strict=True):
        assert row["_step"] == step["step"]
        logged = {k: v for k, v in step.items() if k not in ("kind", "step") and "visits_hist" not in k}
        assert {k: row.get(k) for k in logged} == pytest.approx(logged)
    assert summary is not None and log.summary["final_val_loss"] == summary["final_val_loss"]


def test_diagnostics_are_told_a_step_later(folder: Path, runs: dict[str, Any]) -> None:
    _, steps, _ = read_metrics(folder / "whole" / "metrics.jsonl")
    told = {s["step"]: s for s in steps if "scape/diagnosed_step" in s}
    assert {at: s["scape/diagnosed_step"] for at, s in told.items()} == {5: 4, 9: 8}
    for step in told.values():
        assert step["scape/residual_norm"] > 0 and 0 < step["scape/mask_overlap"] <= 1
        assert sum(v for k, v in step.items() if "visits_hist" in k) == pytest.approx(1)
        assert step["scape/bytes_scalar"] > steps[5]["scape/bytes_scalar"]
    assert steps[-1]["scape/visits"] == pytest.approx(1.0, rel=0.01)  # 10 steps at 90%
    assert steps[-1]["scape/sparsity"] == pytest.approx(0.9, rel=0.01)
    assert steps[-1]["bytes_cumulative"] == pytest.approx(sum(s["bytes_sent"] for s in steps))


def test_every_key_of_a_record_is_documented(folder: Path, runs: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    config, steps, summary = read_metrics(folder / "whole" / "metrics.jsonl")
    assert summary is not None
    keys = {key for step in steps for key in step} | set(summary)
    plain = {re.sub(r"visits_hist_\d+", "visits_hist_N", key) for key in keys} - {"kind"}
    assert {key for key in plain if f"`{key}`" not in page} <= {"params", "world_size"} | set(config)


def test_a_checkpoint_can_be_evaluated(folder: Path, runs: dict[str, Any]) -> None:
    """The weights that evals.downstream reads are those that the run ended with."""
    checkpoint = find(folder / "halves", parse([str(folder / "halves")]))
    assert (checkpoint.name, checkpoint.preset, checkpoint.seq) == ("halves/step10", "tiny", 64)
    assert len(load_tokenizer(checkpoint)) > 257
    model = load_model(checkpoint)
    saved = torch.load(checkpoint.path / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())  # an fp32 run


def test_a_bad_argument_is_named_by_every_rank(folder: Path) -> None:
    process = pretrain(folder / "bad", "--set", "optimizer.params.sparsity=1.5", "--data", "embedded", "--steps", 2)
    said = process.stdout + process.stderr
    assert process.returncode != 0
    assert said.count("optimizer.params.sparsity = 1.5") >= 2 and "Remedy" in said
    assert not (folder / "bad" / "metrics.jsonl").exists()
