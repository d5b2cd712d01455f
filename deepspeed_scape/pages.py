"""Memory for state of the size of a partition or of the model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(numel,) zeros that are visited here and there.

    On a CPU they lie in numpy's memory, for which numpy asks Linux for pages of 2 MiB (``NUMPY_MADVISE_HUGEPAGE``):
    of pages of 4 KiB nearly every visit would look up another one. torch asks only where the user has set
    ``THP_MEM_ALLOC_ENABLE``.
    """
    if device.type != "cpu" or numel == 0:  # numpy gives an empty array no stride that could be viewed
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(numel * dtype.itemsize, np.uint8)).view(dtype)
