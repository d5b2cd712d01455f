"""Score and top-k of every block in one pass: one row of a tile is one block, the k-th largest key is found bit by bit.

Writes the wire's code itself: the place in the block, one byte, or a low and a high plane for blocks above 256.

Floor, bytes an element: 12 (residual, first moment, time of the last visit) + density. Arithmetic: 31 counts of a row,
about 70 instructions an element, as long as the loads on an H200, beside which they run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepspeed_scape.adams import delay_tables
from deepspeed_scape.encoding import MaskCode
from deepspeed_scape.kernels import naive
from deepspeed_scape.kernels.launch import EXACT, blocks, on_its_device
from deepspeed_scape.kernels.score import score_key
from deepspeed_scape.mask import Moments

TILE = 1024  # elements of a program, where blocks are shorter
WIDEST = 4096  # a longer block would not stay in the registers of one program; the torch twin takes it


@triton.jit(do_not_specialize=["step"])
def _block_top_k(
    gradient,  # (S,) fp32 or bf16
    exp_avg,  # (S,) fp32
    last,  # (S,) int32
    share,  # (more than step,) fp32 tables
    moved,
    out,  # (K,) or (2, K) uint8, written: low bytes, then high bytes
    first,  # the first element
    first_out,  # the first byte
    n_rows,
    plane,  # K: from a low byte to its high byte
    step,
    SIZE: tl.constexpr,  # elements of a block
    KEPT: tl.constexpr,  # k
    WIDE: tl.constexpr,  # high bytes too
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,  # SIZE, rounded up to a power of two
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    inside = (row < n_rows)[:, None] & (col < SIZE)[None, :]
    i = first + row[:, None] * SIZE + col[None, :]
    r = tl.load(gradient + i, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + i, mask=inside, other=0.0)
    delay = step - tl.load(last + i, mask=inside, other=0)
    key = tl.where(inside, score_key(r, m, delay, share, moved, inside), -1)

    smallest = tl.zeros([ROWS], tl.int32)
    for bit in range(31):
        guess = smallest | (1 << (30 - bit))
        reached = tl.sum((key >= guess[:, None]).to(tl.int32), axis=1)
        smallest = tl.where(reached >= KEPT, guess, smallest)

    above = key > smallest[:, None]
    room = KEPT - tl.sum(above.to(tl.int32), axis=1)
    tie = key == smallest[:, None]
    chosen = above | (tie & (tl.cumsum(tie.to(tl.int32), axis=1) <= room[:, None]))
    chosen = chosen & inside
    rank = tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    place = first_out + row[:, None] * KEPT + rank
    offset = tl.zeros([ROWS, WIDTH], tl.int32) + col[None, :]
    tl.store(out + place, (offset & 255).to(tl.uint8), mask=chosen)
    if WIDE:
        tl.store(out + plane + place, (offset >> 8).to(tl.uint8), mask=chosen)


@on_its_device
def block_top_k(moments: Moments, step: int, beta1: float, code: MaskCode, out: Tensor) -> None:
    """See :class:`deepspeed_scape.kernels.Ops`."""
    if code.block_size > WIDEST:
        naive.block_top_k(moments, step, beta1, code, out)
        return
    n_rows, tail = divmod(code.size, code.block_size)
    tables = delay_tables(beta1, 0.0, step, out.device)
    arguments = (moments.gradient, moments.exp_avg, moments.last, tables.share, tables.moved, out)
    tail_kept = code.kept - n_rows * code.block_kept
    for first, first_out, rows, size, kept in (
        (0, 0, n_rows, code.block_size, code.block_kept),
        (n_rows * code.block_size, n_rows * code.block_kept, 1, tail, tail_kept),
    ):
        if rows and size:
            width = triton.next_power_of_2(size)
            height = max(1, TILE // width)
            _block_top_k[(blocks(rows, height),)](
                *arguments, first, first_out, rows, code.kept, step,
                SIZE=size, KEPT=kept, WIDE=code.nbytes > code.kept, ROWS=height, WIDTH=width,
                num_warps=4 if width <= 1024 else 8, **EXACT,
            )  # fmt: skip
