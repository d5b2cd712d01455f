"""Write the gathered parameters into the flat replica.

    flat[position[w K + k]] = values[w, k]

Floor, bytes for each of W K entries: 8 (position) + e (value) + a sector of 32 bytes, which the cache reads before it
writes a part of it (64), or 2 e P where that is less.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepspeed_scape.kernels.launch import blocks, on_its_device
from deepspeed_scape.kernels.place import place_of

BLOCK = 1024


@triton.jit
def _scatter(
    flat,  # (P,) model dtype, updated
    position,  # (W*K,) int64
    values,  # (W, K) model dtype, rows row_stride apart
    kept,  # K
    row_stride,
    BLOCK: tl.constexpr,
):
    row, k, inside, place = place_of(position, kept, BLOCK)
    tl.store(flat + place, tl.load(values + row * row_stride + k, mask=inside), mask=inside)


@on_its_device
def scatter_params(flat: Tensor, position: Tensor, values: Tensor) -> None:
    world, kept = values.shape
    if values.numel():
        values = values if values.stride(1) == 1 else values.contiguous()
        _scatter[(blocks(kept, BLOCK), world)](flat, position, values, kept, values.stride(0), BLOCK=BLOCK, num_warps=4)
