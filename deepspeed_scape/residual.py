"""The residual (error feedback): each rank's own gradients, summed since each element was last synchronised.

Letters: P flat elements of one parameter group, W ranks, K elements kept of each partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from deepspeed_scape.kernels import loops_for

CHUNK = 65536  # elements; on a CPU a pass in pieces of this size finds its buffers in the L2 cache


def chunks(count: int, device: torch.device) -> Iterator[slice]:
    """Slices of at most CHUNK elements on a CPU; one slice on a GPU, where each piece would cost a launch."""
    size = CHUNK if device.type == "cpu" else max(count, 1)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def sum_squares(grads: Iterable[Tensor]) -> Tensor:
    """Sum of ||g||^2 over local gradients of any float dtype, as a 0-dim fp64 tensor; not finite if any element is not.

    Pieces are summed in fp32 and their sums in fp64. A piece of finite values too large for fp32 squares is done again
    in fp64, so that only a real inf or nan can cause a skipped step.
    """
    total: Tensor | None = None
    for grad in grads:
        flat = grad.reshape(-1)
        for piece in chunks(flat.numel(), flat.device):
            part = _sum_squares_piece(flat[piece])
            total = part if total is None else total.add_(part)
    return torch.zeros((), dtype=torch.float64) if total is None else total


def _sum_squares_piece(values: Tensor) -> Tensor:
    if values.device.type != "cpu":
        return torch.linalg.vector_norm(values, dtype=torch.float64).square()
    values = values.float()
    part = torch.dot(values, values).double()
    return part if torch.isfinite(part) else torch.linalg.vector_norm(values, dtype=torch.float64).square()


def accumulate(
    residual: Tensor,  # (P,) fp32 or bf16, updated
    grad: Tensor,  # (n,) any float dtype, one parameter's gradient
    start: int,  # where the parameter begins in the flat buffer
    scale: float | Tensor,  # clip coefficient / loss scale
) -> None:
    """Add one scaled local gradient to the residual, in place and without a temporary of its size."""
    flat = grad.reshape(-1)
    for piece in chunks(flat.numel(), flat.device):
        target = residual[start + piece.start : start + piece.stop]
        if target.dtype == torch.float32:
            target.add_(flat[piece].float(), alpha=float(scale))
        else:  # a bf16 residual rounds once, after an fp32 sum
            target.copy_(torch.add(target.float(), flat[piece].float(), alpha=float(scale)))


def pack(
    residual: Tensor,  # (P,) fp32 or bf16; the packed entries become 0
    position: Tensor | None,  # (W*K,) int64 places in the flat buffer, rank by rank; None takes all
    out: Tensor,  # (W, K) value dtype, written: what this rank sends to each owner
) -> None:
    """Take the masked entries out of the residual, leaving zeros."""
    if position is None:
        out.copy_(residual.view(out.shape))
        residual.zero_()
    elif (loops := loops_for(residual, position)) and residual.dtype == out.dtype == torch.float32:
        loops.pack(residual.numpy(), position.numpy(), out.numpy())
    else:
        out.copy_(residual.index_select(0, position).view(out.shape))
        residual.index_fill_(0, position, 0.0)


def scatter_params(
    flat: Tensor,  # (P,) model dtype, this rank's replica, updated
    position: Tensor | None,  # (W*K,) int64; None for a dense step
    values: Tensor,  # (W, K) model dtype: the new parameters of every owner
) -> None:
    """Write the gathered parameters into the replica; the model's parameters are views into it."""
    if position is None:
        flat.copy_(values.reshape(-1))
    else:
        flat.index_copy_(0, position, values.reshape(-1))
