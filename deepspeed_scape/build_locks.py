"""Torch's extension builds: which are still to come, and the locks that interrupted ones have left behind.

DeepSpeed compiles extensions at their first use: on CPUs one for its communication, and its fused Adam for AdamW. That
takes minutes without a word. If it is killed, the lock stays, and every later start waits for it: for ever.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

NEEDED = "deepspeed_shm_comm"  # the only extension that a run with SCAPE builds


def left_behind() -> list[Path]:
    """Locks in the folder where torch builds for this user that no process of this machine holds."""
    # in the default folder, versions of Python and CUDA come between
    found = sorted(path for pattern in ("*/lock", "*/*/lock") for path in _root().glob(pattern))
    held = set(_open_files()) if found else set()
    return [path for path in found if str(path.resolve()) not in held]


def _root() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")


def is_built(name: str) -> bool:
    """Whether torch will find this extension built, by this Python and for this torch."""
    between = ""
    if not os.environ.get("TORCH_EXTENSIONS_DIR"):
        cuda = torch.version.cuda
        kind = f"cu{cuda.replace('.', '')}" if cuda else "rocm*" if torch.version.hip else "cpu"
        between = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}_{kind}/"
    return any(_root().glob(f"{between}{name}/{name}*.so"))


def to_come(name: str) -> str:
    """What is said before such a build."""
    return f"DeepSpeed compiles {name} now, once for this environment; that takes minutes and prints nothing"


def _open_files() -> Iterator[str]:
    for process in psutil.process_iter():
        try:
            yield from (file.path for file in process.open_files())
        except psutil.Error:  # gone, or somebody else's
            continue


def complaint(path: Path) -> str:
    """What is wrong with such a lock, and the remedy."""
    return f"{path}: left by a build that was interrupted; whoever needs it waits for ever. Remedy: rm {path}"
