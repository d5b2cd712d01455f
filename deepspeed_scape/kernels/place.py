"""Where the entries of a message lie in the flat buffer: (row, k) of (W, K) at position[row K + k]."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_of(
    position,  # (W*K,) int64
    kept,  # K
    BLOCK: tl.constexpr,
):
    """Row and columns of this program (grid: blocks of a row, rows), which of them exist, and their places."""
    row = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = k < kept
    return row, k, inside, tl.load(position + row * kept + k, mask=inside, other=0)
