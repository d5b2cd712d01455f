"""The programs that a launcher needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from launch.preflight.findings import Findings

PACKAGES = {"pdsh": "pdsh", "ssh": "openssh-client", "sbatch": "slurm-client", "srun": "slurm-client",
            "scontrol": "slurm-client"}  # fmt: skip
# what `mpirun --version` says, the names that Debian gives each kind, its package
MPI_KINDS = {
    "openmpi": ("Open MPI", ("mpirun", "mpirun.openmpi"), "openmpi-bin"),
    "mpich": ("HYDRA", ("mpirun", "mpirun.mpich", "mpiexec.hydra"), "mpich"),
}


def need(names: tuple[str, ...], findings: Findings) -> None:
    """Refuse each of these programs that is not on the PATH."""
    for name in names:
        if shutil.which(name) is None:
            remedy = f"apt-get install {PACKAGES[name]}, or add to PATH"
            findings.refuse(f"program {name}", "is not on the PATH", remedy)


def find_deepspeed(findings: Findings) -> str:
    """The `deepspeed` command of this Python's environment, else the one on the PATH."""
    beside = Path(sys.executable).with_name("deepspeed")
    found = str(beside) if beside.is_file() else shutil.which("deepspeed")
    if found is None:
        why = f"is neither beside {sys.executable} nor on the PATH"
        findings.refuse("program deepspeed", why, "activate the environment that has it, or set PYTHON to its own")
    return found or "deepspeed"


def find_mpirun(kind: str, findings: Findings) -> str:
    """The mpirun of this kind: $MPIRUN, mpirun, or a name under which Debian keeps it beside another kind."""
    mark, names, package = MPI_KINDS[kind]
    asked = os.environ.get("MPIRUN")
    others = []
    for name in (asked,) if asked else names:
        said = _version(name)
        if mark in said:
            return name
        if said:
            others.append(f"{name} is `{said.splitlines()[0]}`")
    what = f"MPIRUN={asked}" if asked else f"program {' or '.join(names)}"
    why = f"{kind} is needed, but {'; '.join(others)}" if others else "is not on the PATH"
    findings.refuse(what, why, f"apt-get install {package}, or set MPIRUN")
    return names[0]


def _version(name: str) -> str:
    try:
        done = subprocess.run([name, "--version"], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout or done.stderr).strip()
