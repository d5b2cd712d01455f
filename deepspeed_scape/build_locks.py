"""Locks of torch's extension builds that an interrupted build has left behind.

DeepSpeed compiles extensions at their first use: on CPUs one for its communication, and its fused Adam for AdamW. If
that is killed, the lock stays, and every later start waits for it: for ever, without a word.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

NEEDED = "deepspeed_shm_comm"  # the only extension that a run with SCAPE builds


def left_behind() -> list[Path]:
    """Locks in the folder where torch builds for this user that no process of this machine holds."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")
    # in the default folder, versions of Python and CUDA come between
    found = sorted(path for pattern in ("*/lock", "*/*/lock") for path in root.glob(pattern))
    held = set(_open_files()) if found else set()
    return [path for path in found if str(path.resolve()) not in held]


def _open_files() -> Iterator[str]:
    for process in psutil.process_iter():
        try:
            yield from (file.path for file in process.open_files())
        except psutil.Error:  # gone, or somebody else's
            continue


def complaint(path: Path) -> str:
    """What is wrong with such a lock, and the remedy."""
    return f"{path}: left by a build that was interrupted; whoever needs it waits for ever. Remedy: rm {path}"
