"""Masks to bytes and back on the device: the codes of ``encoding``, without a host that has to learn a size.

Where an element goes depends on all before it, so each code is two passes with the running sums of the blocks between:
sums of each block -> torch's cumsum over the blocks -> write.

Floors, bytes: encoding delta 2 x 8 K + nbytes; decoding delta and bitmap 2 x W nbytes + 8 W K; encoding a bitmap
8 K + 2 S + S/8; offsets W nbytes + 8 W K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed_scape.encoding import ESCAPE, MaskCode
from deepspeed_scape.kernels.launch import blocks, on_its_device

BLOCK = 1024


@triton.jit
def _gaps(index, k, kept):
    """(gap, inside) of the k-th index to the one before."""
    inside = k < kept
    here = tl.load(index + k, mask=inside, other=0)
    before = tl.load(index + k - 1, mask=inside & (k > 0), other=-1)
    return tl.where(inside, here - before - 1, 0), inside


@triton.jit
def _escapes(index, sums, kept, n_blocks, BLOCK: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gap, _ = _gaps(index + row * kept, k, kept)
    tl.store(sums + row * n_blocks + block, tl.sum(gap // 255, axis=0))


@triton.jit
def _write_delta(index, sums, running, out, kept, row_stride, n_blocks, BLOCK: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gap, inside = _gaps(index + row * kept, k, kept)
    escapes = gap // 255
    before = tl.load(running + row * n_blocks + block) - tl.load(sums + row * n_blocks + block)
    place = k + before + tl.cumsum(escapes, axis=0)
    tl.store(out + row * row_stride + place, (gap - escapes * 255).to(tl.uint8), mask=inside)


@triton.jit
def _pack_bits(flags, out, nbytes, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < nbytes
    bit = tl.arange(0, 8)
    flags += row * nbytes * 8
    flag = tl.load(flags + at[:, None] * 8 + bit[None, :], mask=inside[:, None], other=0).to(tl.int32)
    tl.store(out + row * row_stride + at, tl.sum(flag << bit[None, :], axis=1).to(tl.uint8), mask=inside)


@triton.jit
def _units(encoded, at, size, BITMAP: tl.constexpr):
    """(advance, taken) of the unit ``at``: a byte of the delta code, or a bit of a bitmap of ``size`` units."""
    inside = at < size
    if BITMAP:
        byte = tl.load(encoded + at // 8, mask=inside, other=0).to(tl.int32)
        taken = ((byte >> (at % 8).to(tl.int32)) & 1) == 1
        advance = tl.where(inside & (taken == 0), 1, 0)
    else:
        advance = tl.load(encoded + at, mask=inside, other=0).to(tl.int32)
        taken = inside & (advance != 255)
    return advance.to(tl.int64), taken.to(tl.int64)


@triton.jit
def _sum_units(encoded, sums, size, row_stride, n_blocks, world, BITMAP: tl.constexpr, BLOCK: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    advance, taken = _units(encoded + row * row_stride, at, size, BITMAP)
    tl.store(sums + row * n_blocks + block, tl.sum(advance, axis=0))
    tl.store(sums + (world + row) * n_blocks + block, tl.sum(taken, axis=0))


@triton.jit
def _store_checked(place, element, mask, elements, faults):
    """Keep a damaged mask inside the partition, and tell of it."""
    beyond = tl.sum((mask & (element >= elements)).to(tl.int32), axis=0)
    if beyond > 0:
        tl.atomic_add(faults, beyond, sem="relaxed")
    tl.store(place, tl.minimum(element, elements - 1), mask=mask)


@triton.jit
def _read_units(
    encoded,  # (W, nbytes) uint8, rows row_stride apart
    sums,  # (2, W, blocks) int64 of _sum_units
    running,  # the same, summed up over the blocks, each including its own
    index,  # (W, K) int64, written
    faults,  # (1,) int32, added to
    size,  # units of a row
    elements,  # S
    kept,
    row_stride,
    n_blocks,
    world,
    BITMAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    advance, taken = _units(encoded + row * row_stride, at, size, BITMAP)
    first, second = row * n_blocks + block, (world + row) * n_blocks + block
    element = tl.load(running + first) - tl.load(sums + first) + tl.cumsum(advance, axis=0)
    rank = tl.load(running + second) - tl.load(sums + second) + tl.cumsum(taken, axis=0) - 1
    element += rank  # what is passed over advances by what the code says, what is taken by itself
    _store_checked(index + row * kept + rank, element, (taken == 1) & (rank < kept), elements, faults)
    if block == n_blocks - 1:  # noqa: SIM102 - Triton has no short-circuit and
        if tl.load(running + second) != kept:
            tl.atomic_add(faults, 1, sem="relaxed")


@triton.jit
def _read_offsets(
    encoded,
    index,
    faults,
    elements,
    kept,
    block_kept,
    full_blocks,
    row_stride,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = k < kept
    byte = encoded + row * row_stride + k
    offset = tl.load(byte, mask=inside, other=0).to(tl.int64)
    if WIDE:
        offset += tl.load(byte + kept, mask=inside, other=0).to(tl.int64) << 8
    # the tail block may keep more or fewer than the others: all beyond the full blocks belong to it
    block = tl.minimum(k // block_kept, full_blocks)
    _store_checked(index + row * kept + k, offset + block * SIZE, inside, elements, faults)


@on_its_device
def encode_masks(index: Tensor, code: MaskCode, out: Tensor) -> None:
    """Offsets of block selection are written by ``block_top_k`` already; here for masks that come from elsewhere."""
    masks, kept = index.shape
    index = index.contiguous()
    if code.kind == "delta":
        out.fill_(ESCAPE)
        if kept:
            n_blocks = blocks(kept, BLOCK)
            sums = torch.empty(masks, n_blocks, dtype=torch.int64, device=index.device)
            grid = (n_blocks, masks)
            _escapes[grid](index, sums, kept, n_blocks, BLOCK=BLOCK, num_warps=4)
            _write_delta[grid](
                index, sums, sums.cumsum(1), out, kept, out.stride(0), n_blocks, BLOCK=BLOCK, num_warps=4
            )
    elif code.kind == "bitmap":
        flags = torch.zeros(masks, code.nbytes * 8, dtype=torch.uint8, device=index.device).scatter_(1, index, 1)
        if code.nbytes:
            grid = (blocks(code.nbytes, BLOCK), masks)
            _pack_bits[grid](flags, out, code.nbytes, out.stride(0), BLOCK=BLOCK, num_warps=4)
    else:
        offset = index % code.block_size
        out[:, :kept].copy_(offset & 255)
        if out.shape[1] > kept:
            out[:, kept:].copy_(offset >> 8)


@on_its_device
def decode_masks(encoded: Tensor, code: MaskCode, faults: Tensor) -> Tensor:
    """A damaged mask too gives indices inside the partition, so that no later kernel leaves its buffers."""
    world, kept = encoded.shape[0], code.kept
    if not kept:
        return torch.empty(world, 0, dtype=torch.int64, device=encoded.device)
    encoded = encoded if encoded.stride(1) == 1 else encoded.contiguous()
    if code.kind == "offset":
        index = torch.empty(world, kept, dtype=torch.int64, device=encoded.device)
        _read_offsets[(blocks(kept, BLOCK), world)](
            encoded, index, faults, code.size, kept, max(code.block_kept, 1), code.size // code.block_size,
            encoded.stride(0), SIZE=code.block_size, WIDE=code.nbytes > kept, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        return index
    index = torch.zeros(world, kept, dtype=torch.int64, device=encoded.device)  # for what a damaged mask leaves out
    bitmap = code.kind == "bitmap"
    size = code.nbytes * (8 if bitmap else 1)
    n_blocks = blocks(size, BLOCK)
    sums = torch.empty(2, world, n_blocks, dtype=torch.int64, device=encoded.device)
    grid = (n_blocks, world)
    shape = (encoded.stride(0), n_blocks, world)
    _sum_units[grid](encoded, sums, size, *shape, BITMAP=bitmap, BLOCK=BLOCK, num_warps=4)
    _read_units[grid](
        encoded, sums, sums.cumsum(2), index, faults, size, code.size, kept, *shape,
        BITMAP=bitmap, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return index
