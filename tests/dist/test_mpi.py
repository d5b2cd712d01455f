"""Ranks started by a plain mpirun: DeepSpeed finds them through mpi4py, and SCAPE trains on them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.metrics import read_metrics
from launch.ports import free_port
from launch.preflight.findings import Findings
from launch.preflight.programs import find_mpirun
from tests.dist.user_folder import DS, for_mpich
from tests.launch import ROOT, extensions_dir

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed: pip install mpi4py"
    ),
]
KINDS = [pytest.param("mpich", id="mpich"), pytest.param("openmpi", id="openmpi", marks=pytest.mark.slow)]


def mpirun(folder: Path, kind: str, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Two ranks of a command on this machine; skips where there is no such mpirun."""
    findings = Findings()
    program = find_mpirun(kind, findings)
    if findings.wrong:
        pytest.skip(findings.wrong[0])
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")}
    kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
             "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": extensions_dir(),
             "GLOO_SOCKET_IFNAME": "lo", **env}  # fmt: skip
    kept |= for_mpich(folder) if kind == "mpich" else {}
    more = ["--oversubscribe"] if kind == "openmpi" else []
    words = [program, "-n", "2", *more, sys.executable, "-u", *command]
    return subprocess.run(
        words, cwd=ROOT, env=kept, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_trains_under_a_plain_mpirun(tmp_path: Path, kind: str) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DS))
    script = tmp_path / "train.py"
    script.write_text("import deepspeed_scape\n" + (ROOT / "tests" / "dist" / "any_launcher.py").read_text())
    words = [str(script), "--deepspeed_config", str(tmp_path / "ds.json"), "--out", str(tmp_path / "out")]
    done = mpirun(tmp_path, kind, *words, "--port", str(free_port()))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = [json.loads((tmp_path / f"out.{rank}.json").read_text()) for rank in range(2)]
    for rank, result in enumerate(results):
        assert (result["RANK"], result["LOCAL_RANK"], result["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert result["optimizer"] == "ScapeZeroOptimizer" and 0 < result["bytes"] < 1700
        assert result["losses"][-1] < 0.7 * result["losses"][0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mpich", "openmpi"])
def test_the_pretraining_job_under_a_plain_mpirun(tmp_path: Path, kind: str) -> None:
    options = [
        "--set",
        "optimizer.params.warmup_steps=0",
        "--preset",
        "tiny",
        "--steps",
        "3",
        "--log-every",
        "1",
        "--eval-batches",
        "2",
        "--output",
        str(tmp_path),
    ]
    config = "ds_configs/zero2_scape99_fp32.json"
    done = mpirun(tmp_path, kind, "launch/pretrain.py", "--deepspeed_config", config, *options,
                  MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    config_record, steps, summary = read_metrics(tmp_path / "metrics.jsonl")
    assert config_record["world_size"] == 2 and len(steps) == 3 and summary is not None
