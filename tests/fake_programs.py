"""Stand-ins for the launchers' programs, so that checks and dry runs can be tested where none is installed.

A dry run never starts a launcher, it only asks for versions and nodes. The `ssh` here runs what it is given on this
machine, so that the real questions are answered by the real Python, only under the name of the host that was asked.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

OPENMPI = 'echo "mpirun (Open MPI) 4.1.4"'
MPICH = "printf 'HYDRA build details:\\n    Version: 4.0.2\\n'"
SSH = r"""
while [ "${1#-}" != "$1" ]; do shift 2; done
case "$1" in down*) echo "ssh: connect to host $1 port 22: Connection refused" >&2; exit 255 ;; esac
status=0
said=$(sh -c "$2" 2>&1) || status=$?
printf 'Welcome!\n%s\n' "$said" | sed "s/\"name\": \"[^\"]*\"/\"name\": \"$1\"/"
exit $status
"""
SLURM = {
    "scontrol": r'printf "%s\n" 203.0.113.1 203.0.113.2',
    "sbatch": 'echo "sbatch: Job 7 to start at 2026-01-01T00:00:00 using 4 processors on nodes n[1-2]" >&2',
    "srun": "exit 1",
}


def add_program(folder: Path, name: str, body: str) -> None:
    """A shell script under this name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def only_these(folder: Path, **programs: str) -> dict[str, str]:
    """An environment whose PATH holds these programs, and the shell's own beside them."""
    for name, body in programs.items():
        add_program(folder, name, body)
    for name in ("bash", "sh", "dirname", "sed", "env", "cat", "hostname"):
        found = next(
            (Path(p) / name for p in os.defpath.split(":") + ["/usr/bin", "/bin"] if (Path(p) / name).exists()), None
        )
        if found is not None and not (folder / name).exists():
            (folder / name).symlink_to(found)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI", "MPI"))}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "DS_ENV_FILE", "MPIRUN", "CUDA_VISIBLE_DEVICES"):
        kept.pop(name, None)
    return kept | {"PATH": str(folder), "PYTHON": sys.executable, "HOME": str(folder)}
