"""Take the masked entries out of the residual, leaving zeros.

    out[w, k] = residual[position[w K + k]];  residual[...] = 0

Floor, bytes for each of W K entries: 8 (position) + e_out + two sectors of 32 bytes (read and write); or 2 e_r P where
that is less (from about 10% on nearly every sector of the residual is met). Positions ascend, so the lanes of a warp
share sectors and neighbouring programs share cache lines.

Of a bucket, a part of one owner's partition that passes over the device, a program takes the places that lie in it:
8 K bytes more, since how many those are is not known on the host.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepspeed_scape.kernels.launch import blocks, on_its_device
from deepspeed_scape.kernels.place import place_of

BLOCK = 1024


@triton.jit
def _pack(
    residual,  # (P,) fp32 or bf16, updated
    position,  # (W*K,) int64
    out,  # (W, K) fp32 or bf16, rows row_stride apart
    kept,  # K
    row_stride,
    BLOCK: tl.constexpr,
):
    row, k, inside, place = place_of(position, kept, BLOCK)
    value = tl.load(residual + place, mask=inside, other=0.0)
    tl.store(out + row * row_stride + k, value.to(out.dtype.element_ty), mask=inside)
    tl.store(residual + place, tl.zeros([BLOCK], residual.dtype.element_ty), mask=inside)


@on_its_device
def pack(residual: Tensor, position: Tensor, out: Tensor) -> None:
    world, kept = out.shape
    if out.numel():
        _pack[(blocks(kept, BLOCK), world)](residual, position, out, kept, out.stride(0), BLOCK=BLOCK, num_warps=4)


@triton.jit
def _pack_bucket(
    bucket,  # (n,) fp32 or bf16, updated
    position,  # (K,) int64
    out,  # (K,) fp32 or bf16, written where the place lies in the bucket
    start,  # int64: of the bucket in the flat buffer
    size,  # n
    kept,  # K
    BLOCK: tl.constexpr,
):
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(position + k, mask=k < kept, other=-1)
    inside = (place >= start) & (place < start + size)
    place -= start
    value = tl.load(bucket + place, mask=inside, other=0.0)
    tl.store(out + k, value.to(out.dtype.element_ty), mask=inside)
    tl.store(bucket + place, tl.zeros([BLOCK], bucket.dtype.element_ty), mask=inside)


@on_its_device
def pack_bucket(bucket: Tensor, start: int, position: Tensor, out: Tensor) -> None:
    kept = out.numel()
    if kept and bucket.numel():
        _pack_bucket[(blocks(kept, BLOCK),)](
            bucket, position, out, start, bucket.numel(), kept, BLOCK=BLOCK, num_warps=4
        )
