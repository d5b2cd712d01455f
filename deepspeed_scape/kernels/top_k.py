"""Exact top-K of a partition: one read of its S elements, then a radix search among the few that can be in it.

    1. sample    the keys of random elements; a key of their order that lies ~4 standard deviations low is the threshold
    2. collect   every element at or above it, block by block, in order       12 S bytes, the only pass over S
    3. again     with threshold 0, where there was no sample or it misled and fewer than K were found (else each program
                 returns at once)
    4. narrow    three histograms of 11 + 10 + 10 bits among the collected: the K-th largest key, and how many of its
                 equals fit
    5. write     counts of each block, their running sums, then the indices of the chosen

Nothing depends on the sample but the time. Ties go to the lowest index since blocks and their elements stay in order.
Programs whose work turns out to be needless return at once, so the host never has to ask.

Floor: 12 S bytes (residual, first moment, time of the last visit) and 8 K (the indices). Steps 4 and 5 read 5 x 4 bytes
of each collected element, 1.1 to 1.4 K of them; where nothing is sampled (K > S/4, small S) that is 5 x 4 S on top,
3.2 reads of S in all with what step 2 writes. Scratch: 6 S bytes, of which a sampled run touches 6 x 1.4 K.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed_scape.adams import delay_tables, momentum_sum
from deepspeed_scape.kernels.launch import EXACT, blocks, on_its_device
from deepspeed_scape.kernels.score import score_key
from deepspeed_scape.mask import Moments
from deepspeed_scape.upload import upload

SAMPLE = 32768
BLOCK = 4096  # elements that one program collects from; also the room for what it finds
ROWS, COLS = 16, 64  # blocks and found elements that one program of steps 4 and 5 works on at a time
COPIES = 32  # of each histogram, so that few programs add to one address at a time
BINS = 2048


@triton.jit(do_not_specialize=["step"])
def _sample(gradient, exp_avg, last, share, moved, places, keys, step, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(places + at)
    inside = i >= 0
    r = tl.load(gradient + i).to(tl.float32)
    key = score_key(r, tl.load(exp_avg + i), step - tl.load(last + i), share, moved, inside)
    tl.store(keys + at, key)


@triton.jit(do_not_specialize=["step"])
def _collect(
    gradient,  # (S,) fp32 or bf16: the owner's own residual
    exp_avg,  # (S,) fp32
    last,  # (S,) int32
    share,  # (more than step,) fp32 tables
    moved,
    threshold,  # (1,) int32 key; not read where AGAIN
    total,  # (1,) int64: found by the pass before; read where AGAIN
    counts,  # (blocks,) int32, written: found in each block
    keys,  # (blocks, BLOCK) int32, the first counts[b] of each row written
    places,  # (blocks, BLOCK) int16, likewise: place in the block
    size,  # S
    kept,  # K
    step,
    largest,  # fp32, no less than any entry of moved
    AGAIN: tl.constexpr,  # with threshold 0
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    if AGAIN:
        if tl.load(total) >= kept:
            return
        least = 0
    else:
        least = tl.load(threshold)
    local = tl.arange(0, BLOCK)
    i = block * BLOCK + local
    inside = i < size
    r = tl.load(gradient + i, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + i, mask=inside, other=0.0)
    delay = step - tl.load(last + i, mask=inside, other=step)
    # share <= 1 and moved <= largest, and rounding keeps order: few lanes need the tables. The comparison is so turned
    # that what is not a number needs them
    bound = tl.abs(r) + largest * tl.abs(m)
    ask = inside & ((bound.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= least)
    key = score_key(r, m, delay, share, moved, ask)
    found = ask & (key >= least)
    rank = block * BLOCK + tl.cumsum(found.to(tl.int32), axis=0) - 1
    tl.store(keys + rank, key, mask=found)
    tl.store(places + rank, local.to(tl.int16), mask=found)
    tl.store(counts + block, tl.sum(found.to(tl.int32), axis=0))


@triton.jit
def _narrow(
    keys,
    counts,
    state,  # (4, 2) int64: before each level but the first, the bits known and how many that share them to take
    histogram,  # (COPIES, BINS) int32 zeros of this level, added to
    n_blocks,
    KNOWN: tl.constexpr,  # how far right the known bits lie
    SHIFT: tl.constexpr,  # and the bits of this level
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    COPIES: tl.constexpr,
    BINS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    count = tl.load(counts + row, mask=row < n_blocks, other=0)
    known = tl.load(state + 2 * LEVEL) if LEVEL else 0
    mine = histogram + (tl.program_id(0) % COPIES) * BINS
    for start in range(0, tl.max(count, axis=0), COLS):
        col = start + tl.arange(0, COLS)
        there = col[None, :] < count[:, None]
        key = tl.load(keys + row[:, None] * BLOCK + col[None, :], mask=there, other=0)
        match = there & ((key >> KNOWN) == known)
        tl.atomic_add(mine + ((key >> SHIFT) & (BINS - 1)), 1, mask=match, sem="relaxed")


@triton.jit
def _find_bin(
    histogram,  # (COPIES, BINS) int32
    state,  # (4, 2) int64; row LEVEL + 1 written
    kept,  # K
    LEVEL: tl.constexpr,
    BITS: tl.constexpr,
    COPIES: tl.constexpr,
    BINS: tl.constexpr,
):
    bin = tl.arange(0, BINS)
    height = tl.zeros([BINS], tl.int64)
    for copy in range(COPIES):
        height += tl.load(histogram + copy * BINS + bin).to(tl.int64)
    wanted = tl.load(state + 2 * LEVEL + 1) if LEVEL else kept
    known = tl.load(state + 2 * LEVEL) << BITS if LEVEL else 0
    above = tl.sum(height, axis=0) - tl.cumsum(height, axis=0)
    here = (above < wanted) & (above + height >= wanted)
    digit = tl.sum(tl.where(here, bin.to(tl.int64), 0), axis=0)
    tl.store(state + 2 * LEVEL + 2, known | digit)
    tl.store(state + 2 * LEVEL + 3, wanted - tl.sum(tl.where(here, above, 0), axis=0))


@triton.jit
def _count(
    keys,
    counts,
    state,
    sums,  # (2, blocks) int32, written: above the K-th key, equal to it
    n_blocks,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    count = tl.load(counts + row, mask=row < n_blocks, other=0)
    smallest = tl.load(state + 6).to(tl.int32)
    above = tl.zeros([ROWS], tl.int32)
    equal = tl.zeros([ROWS], tl.int32)
    for start in range(0, tl.max(count, axis=0), COLS):
        col = start + tl.arange(0, COLS)
        there = col[None, :] < count[:, None]
        key = tl.load(keys + row[:, None] * BLOCK + col[None, :], mask=there, other=-1)
        above += tl.sum((key > smallest).to(tl.int32), axis=1)
        equal += tl.sum((key == smallest).to(tl.int32), axis=1)
    tl.store(sums + row, above, mask=row < n_blocks)
    tl.store(sums + n_blocks + row, equal, mask=row < n_blocks)


@triton.jit
def _write(
    keys,
    places,
    counts,
    state,
    sums,  # (2, blocks) int32 of _count
    running,  # (2, blocks) int64: their running sums, each including its own block
    index,  # (K,) int64, written
    n_blocks,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < n_blocks
    count = tl.load(counts + row, mask=real, other=0)
    smallest = tl.load(state + 6).to(tl.int32)
    room = tl.load(state + 7)
    above = tl.load(running + row, mask=real, other=0) - tl.load(sums + row, mask=real, other=0)
    equal = tl.load(running + n_blocks + row, mask=real, other=0) - tl.load(sums + n_blocks + row, mask=real, other=0)
    place = above + tl.minimum(equal, room)  # where this block's first chosen element goes
    for start in range(0, tl.max(count, axis=0), COLS):
        col = start + tl.arange(0, COLS)
        there = col[None, :] < count[:, None]
        at = row[:, None] * BLOCK + col[None, :]
        key = tl.load(keys + at, mask=there, other=-1)
        tie = (key == smallest).to(tl.int64)
        fits = equal[:, None] + tl.cumsum(tie, axis=1) <= room
        chosen = (key > smallest) | ((key == smallest) & fits)
        step = chosen.to(tl.int64)
        local = tl.load(places + at, mask=chosen, other=0).to(tl.int64)
        goes = place[:, None] + tl.cumsum(step, axis=1) - 1
        tl.store(index + goes, row[:, None] * BLOCK + local, mask=chosen)
        equal += tl.sum(tie, axis=1)
        place += tl.sum(step, axis=1)


@functools.lru_cache(maxsize=64)
def _places(size: int, count: int, seed: int, device: torch.device) -> Tensor:
    """(count,) int64 random places; a stride would fall into step with the rows of a weight matrix."""
    generator = torch.Generator().manual_seed(seed)
    return upload(torch.randint(size, (count,), generator=generator), device)


def _threshold(arguments: tuple[Tensor, ...], size: int, step: int, kept: int, seed: int) -> Tensor | None:
    """(1,) int32 key that nearly always at least K elements reach; None where a sample would not pay."""
    gradient = arguments[0]
    if kept * 4 >= size or size <= 4 * SAMPLE:
        return None
    keys = torch.empty(SAMPLE, dtype=torch.int32, device=gradient.device)
    per_program = min(SAMPLE, 256)
    _sample[(SAMPLE // per_program,)](
        *arguments, _places(size, SAMPLE, seed, gradient.device), keys, step, BLOCK=per_program, num_warps=4, **EXACT
    )
    expected = kept * SAMPLE / size
    rank = min(SAMPLE, int(expected + 4 * expected**0.5) + 8)
    return torch.topk(keys, rank).values[rank - 1 :]


@on_its_device
def top_k(moments: Moments, step: int, beta1: float, kept: int, seed: int) -> Tensor:
    """See :class:`deepspeed_scape.kernels.Ops`."""
    size, device = moments.last.numel(), moments.last.device
    index = torch.empty(kept, dtype=torch.int64, device=device)
    if kept == 0:
        return index
    tables = delay_tables(beta1, 0.0, step, device)
    arguments = (moments.gradient, moments.exp_avg, moments.last, tables.share, tables.moved)
    n_blocks = blocks(size, BLOCK)
    counts = torch.empty(n_blocks, dtype=torch.int32, device=device)
    keys = torch.empty(n_blocks * BLOCK, dtype=torch.int32, device=device)
    places = torch.empty(n_blocks * BLOCK, dtype=torch.int16, device=device)
    threshold = _threshold(arguments, size, step, kept, seed)
    if threshold is None:
        total = torch.zeros(1, dtype=torch.int64, device=device)
    else:
        _collect[(n_blocks,)](
            *arguments, threshold, threshold, counts, keys, places, size, kept, step, momentum_sum(beta1),
            AGAIN=False, BLOCK=BLOCK, num_warps=8, **EXACT,
        )  # fmt: skip
        total = counts.sum().view(1)
    _collect[(n_blocks,)](
        *arguments, total, total, counts, keys, places, size, kept, step, momentum_sum(beta1),
        AGAIN=True, BLOCK=BLOCK, num_warps=8, **EXACT,
    )  # fmt: skip
    state = _find_smallest(keys, counts, kept)
    sums = torch.empty(2, n_blocks, dtype=torch.int32, device=device)
    grid = (blocks(n_blocks, ROWS),)
    _count[grid](keys, counts, state, sums, n_blocks, BLOCK=BLOCK, ROWS=ROWS, COLS=COLS, num_warps=4)
    running = sums.cumsum(1)
    _write[grid](
        keys, places, counts, state, sums, running, index, n_blocks, BLOCK=BLOCK, ROWS=ROWS, COLS=COLS, num_warps=4
    )
    return index


def _find_smallest(keys: Tensor, counts: Tensor, kept: int) -> Tensor:
    """(4, 2) int64, in its last row the K-th largest key and how many elements that equal it are to be taken."""
    n_blocks = counts.numel()
    state = torch.empty(4, 2, dtype=torch.int64, device=counts.device)
    histograms = torch.zeros(3, COPIES, BINS, dtype=torch.int32, device=counts.device)
    for level, (known, shift) in enumerate(((31, 20), (20, 10), (10, 0))):
        bins = 2048 if level == 0 else 1024
        _narrow[(blocks(n_blocks, ROWS),)](
            keys, counts, state, histograms[level], n_blocks, KNOWN=known, SHIFT=shift, LEVEL=level,
            BLOCK=BLOCK, ROWS=ROWS, COLS=COLS, COPIES=COPIES, BINS=bins, num_warps=4,
        )  # fmt: skip
        _find_bin[(1,)](
            histograms[level], state, kept, LEVEL=level, BITS=known - shift, COPIES=COPIES, BINS=bins, num_warps=8
        )
    return state
