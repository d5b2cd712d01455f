"""How alike the ranks' gradients of one step are, seen by an owner from its own: what clipping asks for under ballots.

A ballot moves part of a rank's residual to the owner, so what the ranks send no longer tells how much of it each had
gathered itself (``norms.py``). What an owner's residual grows by in a step is still its own gradient g of that step. At
its K masked elements the mean of what all ranks gathered in D steps, R/D, holds the same signal s and hardly any of the
noise of g, so with W ranks

    ||s||^2 = sum (g R - g^2 / W) / (D - 1/W)      (g itself is one of the W D gradients in R)
    ||mean g||^2 = ||s||^2 (1 - 1/W) + ||g||^2 / W
"""

from __future__ import annotations

from torch import Tensor


class NewestGradient:
    """An owner's own gradient of one step, (K,) fp32 at its masked elements."""

    def __init__(
        self,
        residual: Tensor,  # (S,) fp32 or bf16: of the own partition, before the gradient is added
        own: Tensor | None,  # (K,) int64: the mask; None if it is still to be made
    ) -> None:
        self._before = residual.clone() if own is None else residual.index_select(0, own)
        self._whole = own is None
        self._values: Tensor | None = None

    def take(
        self,
        residual: Tensor,  # (S,): the same with the gradient
        own: Tensor,  # (K,) int64
    ) -> None:
        """Look at the residual once more, before the mask's entries are taken out of it."""
        before = self._before.index_select(0, own) if self._whole else self._before
        self._values = residual.index_select(0, own).float().sub_(before)

    def squares(
        self,
        mean: Tensor,  # (K,) fp32: R
        delay: Tensor,  # (K,) integer, >= 1: D
        world_size: int,
    ) -> tuple[Tensor, Tensor]:  # 0-dim fp64: ||mean g||^2, and W ||g||^2
        """Sums whose totals over the owners stand for ||mean||^2 and the ranks' squares in ``GradientNorms``."""
        assert self._values is not None
        newest, steps = self._values.double(), delay.double()
        square = newest.square()
        signal = (newest * mean.double() - square / world_size) / (steps - 1 / world_size)
        total = square.sum()
        return signal.sum() * (1 - 1 / world_size) + total / world_size, total * world_size
