"""The residual (error feedback): each rank's own gradients, summed since each element was last synchronised.

Letters: P flat elements of one parameter group, W ranks, K elements kept of each partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from deepspeed_scape.kernels import ops_for

CHUNK = 65536  # elements; on a CPU a pass in pieces of this size finds its buffers in the L2 cache


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


def pack(
    residual: Tensor,  # (P,) fp32 or bf16; the packed entries become 0
    position: Tensor | None,  # (W*K,) int64 places in the flat buffer, rank by rank; None takes all
    out: Tensor,  # (W, K) value dtype, written: what this rank sends to each owner
) -> None:
    """Take the masked entries out of the residual, leaving zeros."""
    ops_for(residual, out).pack(residual, position, out)


def scatter_params(
    flat: Tensor,  # (P,) model dtype, this rank's replica, updated
    position: Tensor | None,  # (W*K,) int64; None for a dense step
    values: Tensor,  # (W, K) model dtype: the new parameters of every owner
) -> None:
    """Write the gathered parameters into the replica; the model's parameters are views into it."""
    ops_for(flat, values).scatter_params(flat, position, values)
