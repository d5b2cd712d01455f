"""A user's shared folder and shell for launches on test nodes, and what a launch left in it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.launch import ROOT, extensions_dir

DS = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "SCAPE", "params": {"lr": 1e-2, "sparsity": 0.9, "warmup_steps": 0}},
}
WHO = """\
import os, socket, sys
ranks = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
line = " ".join(["WHO", *ranks, socket.gethostname(), str(sys.argv[1:])])
os.write(1, f"{line}\\n".encode())  # in one piece: ranks of a node share the stream
"""
ONE_FAILS = """\
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(float(sys.argv[1]))
"""
MODULE = ("--module", "deepspeed_scape.run", "train.py", "--deepspeed_config", "ds.json", "--out")
FIRST = "10.77.0.1"  # node1's address


def fill(folder: Path) -> Path:
    """Hostfile, .deepspeed_env, a configuration and scripts, for two nodes of one rank each."""
    (folder / "hostfile").write_text("node1 slots=1\nnode2 slots=1\n")
    variables = {
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
        "TORCH_EXTENSIONS_DIR": extensions_dir(),
        "TOKENIZERS_PARALLELISM": "false",
    }
    (folder / ".deepspeed_env").write_text("".join(f"{k}={v}\n" for k, v in variables.items()))
    (folder / "ds.json").write_text(json.dumps(DS))
    script = (ROOT / "tests" / "dist" / "any_launcher.py").read_text()
    (folder / "train.py").write_text(script)
    (folder / "imports.py").write_text(f"import deepspeed_scape\n{script}")
    (folder / "who.py").write_text(WHO)
    (folder / "one_fails.py").write_text(ONE_FAILS)
    return folder


def shell(folder: Path, **more: str) -> dict[str, str]:
    """What the user's shell has set."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    keep = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    own = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(folder)}
    return {**own, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **root, **keep, **more}


def check_reports(folder: Path, name: str) -> list[list[float]]:
    """SCAPE trained, one rank on each node, told the right address; returns the losses by rank."""
    results: list[dict[str, Any]] = [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(2)]
    assert [r["host"] for r in results] == ["node1", "node2"] and [r["LOCAL_RANK"] for r in results] == ["0", "0"]
    assert {r["MASTER_ADDR"] for r in results} == {FIRST}
    for rank, result in enumerate(results):
        assert result["optimizer"] == "ScapeZeroOptimizer" and result["RANK"] == str(rank)
        assert 0 < result["bytes"] < 1700 and result["losses"][-1] < 0.7 * result["losses"][0]
    return [r["losses"] for r in results]


def for_mpich(folder: Path) -> dict[str, str]:
    """Variables with which mpi4py's wheel finds MPICH: it loads libmpi.so.12, and Debian's is named libmpich.so.12."""
    (folder / "lib").mkdir(exist_ok=True)
    link = folder / "lib" / "libmpi.so.12"
    for found in Path("/usr/lib").glob("*/libmpich.so.12"):
        link.unlink(missing_ok=True)
        link.symlink_to(found)
    return {"LD_LIBRARY_PATH": str(folder / "lib"), "MPI4PY_MPIABI": "mpich"}
