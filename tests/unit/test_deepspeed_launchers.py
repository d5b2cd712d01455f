"""Why launch/openmpi.sh, mpich.sh and slurm.sbatch call mpirun and srun themselves: what DeepSpeed's own launchers do.

docs/multinode.md says it. When DeepSpeed mends one of these its test fails, and script and page can become simpler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed.launcher
import pytest
from deepspeed.launcher.multinode_runner import MPICHRunner, OpenMPIRunner, SlurmRunner
from deepspeed.launcher.runner import encode_world_info, parse_args

POOL = {"node1": 2, "node2": 2}
HELPER = Path(deepspeed.launcher.__file__).with_name("launcher_helper.py")


def command(runner: Any) -> list[str]:
    """What a launcher of DeepSpeed's runs for a module, told where to meet."""
    meeting = ["--master_addr", "10.0.0.1", "--master_port", "29600"]
    args = parse_args(["--hostfile", "hostfile", *meeting, "--module", "deepspeed_scape.run", "train.py"])
    active = {name: list(range(slots)) for name, slots in POOL.items()}
    words: list[str] = runner(args, encode_world_info(active), POOL).get_cmd(dict(os.environ), active)
    return words


def test_openmpi_is_not_told_where_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed 0.16.9 does not even start outside an mpirun, which is what it is there to start."""
    for name in ("LOCAL_RANK", "RANK", "SIZE"):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", "1")
    words = command(OpenMPIRunner)
    assert words[-3:] == ["-m", "deepspeed_scape.run", "train.py"]
    assert not any("10.0.0.1" in word or "29600" in word for word in words)


def test_mpich_takes_its_own_helpers_path_for_a_module() -> None:
    words = command(MPICHRunner)
    assert words[words.index("-m") + 1].endswith("launcher_helper.py")


def test_slurm_forgets_the_module() -> None:
    words = command(SlurmRunner)
    assert "-m" not in words and words[-2:] == ["deepspeed_scape.run", "train.py"]


def test_mpichs_helper_hides_a_rank_that_fails(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)\n")
    env = os.environ | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0", "DS_ACCELERATOR": "cpu"}
    words = [sys.executable, str(HELPER), "--launcher", "mpich", str(script)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
