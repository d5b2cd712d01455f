"""The largest magnitudes of many short rows at once, by torch's own kernels: no row has launches of its own.

    1. rank      torch's radix search for the K-th magnitude of each row
    2. choose    what is larger, and as many of its equals, by the lowest index, as there is room for
    3. write     the k-th place is where the running count of the chosen first reaches k, so no size has to be known

Floor: 4 S bytes a row (2 of bf16) and 8 K. Step 1 reads a row once for each digit, steps 2 and 3 write and read two
running counts and four sets of flags: about 100 bytes an element in all, 20 of them held at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_scape.mask import infinite_if_nan


def largest_of_rows(rows: Tensor, kept: int) -> Tensor:
    """See :class:`deepspeed_scape.kernels.Ops`."""
    if kept == 0:
        return torch.empty(rows.shape[0], 0, dtype=torch.int64, device=rows.device)
    size = infinite_if_nan(rows.abs().float())
    smallest = size.topk(kept, dim=1, sorted=False).values.amin(1, keepdim=True)
    chosen = size > smallest
    ties = size == smallest
    room = kept - chosen.sum(1, keepdim=True)
    chosen |= ties & (ties.cumsum(1, dtype=torch.int32) <= room)
    count = torch.arange(1, kept + 1, dtype=torch.int32, device=rows.device)
    return torch.searchsorted(chosen.cumsum(1, dtype=torch.int32), count.repeat(rows.shape[0], 1))
