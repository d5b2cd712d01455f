"""The end of a process group, where torch itself may never come back from it.

Before torch 2.8 (pytorch#154976) gloo's groups are destroyed with Python's lock held, while one of their threads may
still need that lock to let go of the tensors of the last collective: the process then hangs at its very end. It was
caught here under torch 2.6, with both stacks.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

_HOLDS_THE_LOCK = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)
_SETTLE = 0.2  # seconds; a thread that waits for the lock gets it in microseconds once it runs


def destroy(group: Any = None) -> None:
    """``dist.destroy_process_group`` (of all groups by default), after gloo's threads have let go of their work."""
    if _HOLDS_THE_LOCK:
        time.sleep(_SETTLE)  # without Python's lock
    dist.destroy_process_group(group)
