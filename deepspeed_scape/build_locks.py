"""Locks of torch's extension builds that an interrupted build has left behind.

DeepSpeed compiles an extension at its first start on a CPU. If that is killed, its lock stays, and every later start
waits for it: for ever, without a word.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

STALE = 600  # seconds; a build takes a minute or two


def left_behind() -> list[Path]:
    """Locks too old for a build that still runs, in the folder where torch builds for this user."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")
    found = []
    for pattern in ("*/lock", "*/*/lock"):  # in the default folder, versions of Python and CUDA come between
        for path in root.glob(pattern):
            try:
                age = time.time() - path.stat().st_mtime
            except OSError:  # gone meanwhile: its build has ended
                continue
            if age > STALE:
                found.append(path)
    return sorted(found)


def complaint(path: Path) -> str:
    """What is wrong with such a lock, and the remedy."""
    return f"{path}: left by a build that was interrupted; whoever needs it waits for ever. Remedy: rm {path}"
