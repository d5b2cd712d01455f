"""Add all gradients of a step to the residual, and the sum of their squares: one launch for any number of parameters.

    residual[start + i] += scale * grad[i]        squares = sum grad[i]^2, not finite exactly if some grad[i] is not

Floor, bytes an element: accumulate e_g + 2 e_r (bf16 gradient, fp32 residual: 10; fp32: 12), squares alone e_g.

One pass or two. A skipped step must leave the residual untouched to the bit; whether it is skipped is known only when
every rank has seen its last element; clipping needs the agreed norm; and r + s g, once rounded, cannot be taken back.
To keep the old residual aside costs as many bytes as reading the gradient again, or more. So a step runs the kernel
twice, ``sum_squares`` before the one scalar all-reduce and ``accumulate`` after: 12 bytes, not 10, in bf16, 16, not
12, in fp32. ``accumulate_and_measure`` is the single pass, exact where nothing is ever skipped or clipped. No step of
ours may promise that, so it serves ``evals/kernels.py``, to tell what the second read costs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed_scape.kernels.launch import EXACT, blocks, on_its_device
from deepspeed_scape.upload import upload

BLOCK = 4096  # elements of a program
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Run(NamedTuple):
    """One launch: gradients of one dtype, all or none of them aligned."""

    grads: list[Tensor]  # (n,) each; kept alive, for the device knows only their addresses
    aligned: bool
    tables: tuple[Tensor, ...]  # addresses, starts, counts, owner, begin of `_stream`, on the device


@triton.jit
def _stream(
    residual,  # (P,) fp32 or bf16, updated where ADD
    addresses,  # (n,) int64: where each gradient lies
    starts,  # (n,) int64: its first element in the residual
    counts,  # (n,) int64: its elements
    owner,  # (chunks,) int32: the gradient that a program works on
    begin,  # (chunks,) int64: its first element of it
    partial,  # (chunks,) fp64, written where SQUARES: the sum of squares
    scale,  # fp32
    GRAD: tl.constexpr,  # the gradients' dtype
    ALIGNED: tl.constexpr,  # every address, start and count is a multiple of 16 bytes, of 8 elements, of 8 elements
    ADD: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0)
    which = tl.load(owner + chunk)
    at = tl.multiple_of(tl.load(begin + chunk), BLOCK)
    count = tl.load(counts + which)
    start = tl.load(starts + which)
    gradient = tl.load(addresses + which).to(tl.pointer_type(GRAD))
    if ALIGNED:
        count = tl.multiple_of(count, 8)
        start = tl.multiple_of(start, 8)
        gradient = tl.multiple_of(gradient, 16)
    offset = at + tl.arange(0, BLOCK)
    inside = offset < count
    grad = tl.load(gradient + offset, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        place = residual + start + offset
        total = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(grad, scale, total)  # as torch's add(alpha=scale)
        tl.store(place, total.to(residual.dtype.element_ty), mask=inside)
    if SQUARES:
        square = tl.sum(grad * grad, axis=0).to(tl.float64)
        if not (square < float("inf")):  # once more in fp64: only a real inf or nan may skip a step
            wide = grad.to(tl.float64)
            square = tl.sum(wide * wide, axis=0)
        tl.store(partial + chunk, square)


@functools.lru_cache(maxsize=64)
def _upload(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return upload(torch.tensor(values, dtype=dtype), device)


@functools.lru_cache(maxsize=64)
def _chunks(counts: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(chunks,) int32 and (chunks,) int64: which gradient, and from where in it, each program works on."""
    each = torch.tensor([blocks(count, size) for count in counts])
    owner = torch.repeat_interleave(torch.arange(len(counts)), each)
    first = torch.cumsum(each, 0) - each
    begin = (torch.arange(owner.numel()) - first[owner]) * size
    return upload(owner.int(), device), upload(begin, device)


def _runs(grads: Sequence[Tensor], starts: Sequence[int], device: torch.device) -> list[Run]:
    """Put together what one launch can take, and send the tables; a copy is made only of what is not in one piece."""
    found: dict[tuple[torch.dtype, bool], tuple[list[Tensor], list[int]]] = {}
    for grad, start in zip(grads, starts, strict=True):
        if grad.numel():
            flat = grad.contiguous()
            aligned = flat.data_ptr() % 16 == 0 and start % 8 == 0 and flat.numel() % 8 == 0
            run = found.setdefault((grad.dtype, aligned), ([], []))
            run[0].append(flat)
            run[1].append(start)
    runs = []
    for (_, aligned), (some, first) in found.items():
        counts = tuple(grad.numel() for grad in some)
        tables = (
            _upload(tuple(grad.data_ptr() for grad in some), torch.int64, device),
            _upload(tuple(first), torch.int64, device),
            _upload(counts, torch.int64, device),
            *_chunks(counts, BLOCK, device),
        )
        runs.append(Run(grads=some, aligned=aligned, tables=tables))
    return runs


@on_its_device
def _launch(residual: Tensor, runs: list[Run], scale: float, add: bool, squares: bool) -> list[Tensor]:
    sums = []
    for run in runs:
        chunks = run.tables[-1].numel()
        partial = torch.empty(chunks if squares else 0, dtype=torch.float64, device=residual.device)
        _stream[(chunks,)](
            residual,
            *run.tables,
            partial,
            scale,
            GRAD=_TYPES[run.grads[0].dtype],
            ALIGNED=run.aligned,
            ADD=add,
            SQUARES=squares,
            BLOCK=BLOCK,
            num_warps=8,
            **EXACT,
        )
        sums.append(partial.sum())
    return sums


def _total(sums: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=device)


def sum_squares(grads: Sequence[Tensor]) -> Tensor:
    """Tiles of 4,096 in fp32, again in fp64 where they overflow; their sums in fp64, always in one order."""
    device = grads[0].device
    return _total(_launch(grads[0], _runs(grads, [0] * len(grads), device), 0.0, False, True), device)


def accumulate(residual: Tensor, grads: Sequence[Tensor], starts: Sequence[int], scale: float) -> None:
    """Rounded once to the residual's dtype, after an fp32 product and an fp32 sum."""
    prepare_accumulate(grads, starts, residual.device)(residual, scale)


def prepare_accumulate(
    grads: Sequence[Tensor], starts: Sequence[int], device: torch.device
) -> Callable[[Tensor, float], None]:
    runs = _runs(grads, starts, device)

    def finish(residual: Tensor, scale: float) -> None:
        _launch(residual, runs, scale, True, False)

    return finish


def accumulate_and_measure(
    residual: Tensor, grads: Sequence[Tensor], starts: Sequence[int], scale: float
) -> Tensor:  # 0-dim fp64: sum_squares(grads)
    """Both in one pass."""
    return _total(_launch(residual, _runs(grads, starts, residual.device), scale, True, True), residual.device)
