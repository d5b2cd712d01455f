"""The residual (error feedback): each rank's own gradients, summed since each element was last synchronised.

With ballots part of it has moved to the owner (see ``ballots.py``); the sum over the ranks is the same.

Letters: P flat elements of one parameter group, W ranks, S = P/W elements of a partition, K kept of each.
:class:`Residual` says what the rest of the package asks of it. It lies on the device here, in ``host_residual.py`` for
the most part in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from deepspeed_scape.kernels import ops_for
from deepspeed_scape.layout import GroupLayout
from deepspeed_scape.pages import zeros

CHUNK = 65536  # elements; on a CPU a pass in pieces of this size finds its buffers in the L2 cache


class Residual(Protocol):
    """The residual of one parameter group on one rank, (P,) fp32 or bf16, wherever it lies."""

    def accumulate(self, grads: Sequence[Tensor], starts: Sequence[int], scale: float) -> None:
        """Add scaled local gradients, each from its start in the flat buffer on."""

    def pack(self, position: Tensor, out: Tensor) -> None:
        """Move the masked entries into ``out`` (W, K), leaving zeros; ``position`` as in :func:`pack`."""

    def take(self, columns: slice, out: Tensor) -> None:
        """Move those columns of every partition into ``out`` (W, n), leaving zeros; see :func:`take`."""

    def partition(self, owner: int) -> Tensor:
        """(S,) on the device, a view: what waits for one owner. This rank's own can always be had."""

    def partitions(self, first: int, stop: int) -> Tensor:
        """(n, S) on the device, a view: what waits for the owners in [first, stop), where all are on the device."""

    def sum_squares(self) -> Tensor:
        """||r||^2, 0-dim fp64 on the device."""

    def state(self) -> Tensor:
        """(P,) for a checkpoint, on any device; not to be changed."""

    def load(self, values: Tensor, start: int = 0) -> None:
        """Replace the elements from ``start`` on by ``values`` (n,), of any float dtype and device."""

    def zero(self) -> None:
        """Forget all that is unsent."""


class DeviceResidual:
    """All P elements in one tensor on the device."""

    def __init__(self, layout: GroupLayout, dtype: torch.dtype, device: torch.device) -> None:
        self.world_size, self.partition_size = layout.world_size, layout.partition_size
        self.values = zeros(layout.numel, dtype, device)  # (P,)

    def accumulate(self, grads: Sequence[Tensor], starts: Sequence[int], scale: float) -> None:
        accumulate(self.values, grads, starts, scale)

    def pack(self, position: Tensor, out: Tensor) -> None:
        pack(self.values, position, out)

    def take(self, columns: slice, out: Tensor) -> None:
        take(self.values.view(self.world_size, -1)[:, columns], out)

    def partition(self, owner: int) -> Tensor:
        return self.partitions(owner, owner + 1)[0]

    def partitions(self, first: int, stop: int) -> Tensor:
        size = self.partition_size
        return self.values[first * size : stop * size].view(stop - first, size)

    def sum_squares(self) -> Tensor:
        return sum_squares([self.values])

    def state(self) -> Tensor:
        return self.values

    def load(self, values: Tensor, start: int = 0) -> None:
        self.values[start : start + values.numel()].copy_(values)

    def zero(self) -> None:
        self.values.zero_()


def chunks(count: int, device: torch.device) -> Iterator[slice]:
    """Slices of at most CHUNK elements on a CPU; one slice on a GPU, where each piece would cost a launch."""
    size = CHUNK if device.type == "cpu" else max(count, 1)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def sum_squares(grads: Iterable[Tensor], device: torch.device | None = None) -> Tensor:
    """Sum of ||g||^2 over local gradients of any float dtype, as a 0-dim fp64 tensor; not finite if any element is not.

    Args:
        grads: all on one device.
        device: where the zero lies that no gradients give; the CPU if not said.
    """
    some = list(grads)
    if not some:
        return torch.zeros((), dtype=torch.float64, device=device)
    return ops_for(*some).sum_squares(some)


def accumulate(
    residual: Tensor,  # (P,) fp32 or bf16, updated
    grads: Sequence[Tensor],  # any float dtype, the local gradients of some parameters
    starts: Sequence[int],  # where each parameter begins in the flat buffer
    scale: float,  # clip coefficient / loss scale
) -> None:
    """Add scaled local gradients to the residual, in place and without a temporary of their size."""
    ops_for(residual, *grads).accumulate(residual, grads, starts, scale)


def prepare_accumulate(
    grads: Sequence[Tensor],  # as for :func:`accumulate`
    starts: Sequence[int],
    device: torch.device,  # of the residual
) -> Callable[[Tensor, float], None]:
    """:func:`accumulate` in two parts: what the device must know goes there now, ``(residual, scale)`` does the work.

    So a small copy need not stand behind the large one that brings the residual (see ``staging.py``).
    """
    return ops_for(torch.empty(0, device=device), *grads).prepare_accumulate(grads, starts, device)


def pack(
    residual: Tensor,  # (P,) fp32 or bf16; the packed entries become 0
    position: Tensor,  # (W*K,) int64 places in the flat buffer, rank by rank
    out: Tensor,  # (W, K) value dtype, written: what this rank sends to each owner
) -> None:
    """Take the masked entries out of the residual, leaving zeros."""
    ops_for(residual, out).pack(residual, position, out)


def take(
    values: Tensor,  # (...) fp32 or bf16, a view of a residual; becomes 0
    out: Tensor,  # of the same shape, value dtype, written
) -> None:
    """:func:`pack` for all of a view: what a dense step sends."""
    out.copy_(values)
    values.zero_()


def pack_bucket(
    bucket: Tensor,  # (n,) fp32 or bf16: a part of one owner's partition; its packed entries become 0
    start: int,  # where it begins in the flat buffer
    position: Tensor,  # (K,) int64 places in the flat buffer: the mask of that owner
    out: Tensor,  # (K,) value dtype, written where the place lies in the bucket
) -> None:
    """:func:`pack` for the entries of one owner that lie in the bucket; the others are left as they are."""
    ops_for(bucket, out).pack_bucket(bucket, start, position, out)


def scatter_params(
    flat: Tensor,  # (P,) model dtype, this rank's replica, updated
    position: Tensor,  # (W*K,) int64
    values: Tensor,  # (W, K) model dtype: the new parameters of every owner
) -> None:
    """Write the gathered parameters into the replica; the model's parameters are views into it."""
    ops_for(flat, values).scatter_params(flat, position, values)
