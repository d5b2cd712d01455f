"""Gradient norms before anything dense exists: the skip verdict, and what clipping takes for the norm.

The norm of the mean gradient is not known on any rank. sqrt(mean_i ||g_i||^2) bounds it from above and is up to sqrt(W)
too large where noise dominates; the share of the signal in the last synchronised buffer corrects it:

    estimate = rms * sqrt(rho),   rho = ||mean_i x_i||^2 / mean_i ||x_i||^2  in [1/W, 1],   1 before the first step

With ballots the buffer no longer tells which rank has gathered what, and rho comes from the owners' own newest
gradients (``newest.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_scape.exchange import Exchange
from deepspeed_scape.residual import sum_squares

LARGEST = 1e15  # a norm: its square, a thousand steps together, still fits fp32 (3e38)


class GradientNorms:
    """Norms of the current step, in units of the loss-scaled gradient until divided by the scale.

    Attributes:
        rms: sqrt(mean over ranks of ||g_i||^2).
        estimate: the norm that clipping uses and that DeepSpeed reports.
        coefficient: what the gradients were multiplied with by clipping, in (0, 1].
        finite: no rank has an inf or nan, and what clipping leaves can be squared in fp32.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.rms = self.estimate = 0.0
        self.coefficient = 1.0
        self.finite = True
        self.signal_share = 1.0  # rho
        self._noted: tuple[Tensor, ...] | None = None  # of the step before, this rank's part

    def agree(
        self,
        local: list[Tensor],  # 0-dim fp64 on ``device``: ||g_i||^2 of each parameter group
        exchange: Exchange,
        device: torch.device,
        mask_faults: Tensor | None = None,  # (1,) int32: what a GPU found wrong with the masks it has decoded
        passengers: Tensor | None = None,  # (n,) fp64: sums that others want to know
    ) -> list[float]:  # n sums over the ranks
        """Sum ||g_i||^2 over the ranks, and with it what else the host must learn: one all-reduce, one wait.

        Raises:
            RuntimeError: a gathered mask was damaged, on any rank; all ranks raise together.
        """
        terms = self.terms(local, device, mask_faults)
        if passengers is not None:
            terms = torch.cat([terms, passengers])
        return self.learn(exchange.sum_scalars(terms))

    def terms(
        self,
        local: list[Tensor],  # 0-dim fp64 on ``device``
        device: torch.device,
        mask_faults: Tensor | None = None,
    ) -> Tensor:  # (4,) fp64: sum ||g_i||^2, the two noted sums, mask faults
        """What this rank contributes to the all-reduce."""
        terms = torch.zeros(4, dtype=torch.float64, device=device)
        for part in local:
            terms[0] += part
        if self._noted is not None:
            terms[1], terms[2] = self._noted
        if mask_faults is not None:
            terms[3:] = mask_faults
        return terms

    def learn(
        self,
        totals: Tensor,  # (4 + n,) fp64: ``terms`` summed over the ranks, and what rode along
    ) -> list[float]:  # the n others
        """Set ``rms``, ``signal_share`` and ``estimate``; here the host waits for the device.

        Raises:
            RuntimeError: see :meth:`agree`.
        """
        total, mean_square, sum_square, faults, *brought = totals.tolist()
        if faults:
            raise RuntimeError("a gathered mask was damaged: it did not hold K elements inside the partition")
        self.rms = math.sqrt(total / self.world_size) if math.isfinite(total) else math.inf
        if self._noted is not None and sum_square > 0 and math.isfinite(sum_square):
            share = mean_square / (sum_square / self.world_size)
            self.signal_share = min(1.0, max(1.0 / self.world_size, share))
        self.estimate = self.rms * math.sqrt(self.signal_share)
        return brought

    def judge(self, clip_grad: float, loss_scale: float) -> None:
        """Set ``coefficient`` = min(1, clip / norm), with DeepSpeed's 1e-6 beside the norm, and ``finite``.

        A gradient may be finite and its square not; DeepSpeed's fp32 norm overflows on it and skips the step too.
        """
        self.coefficient = 1.0
        if clip_grad > 0 and math.isfinite(self.estimate):
            self.coefficient = min(1.0, clip_grad / (self.estimate / loss_scale + 1e-6))
        self.finite = self.rms * self.coefficient / loss_scale < LARGEST

    def note_synchronised(
        self,
        packed: Tensor,  # (W, K) value dtype: what this rank sent
        mean: Tensor,  # (K,) fp32: what this owner received
        further: bool = False,  # another piece of the same step
    ) -> None:
        """Keep the two sums whose ratio, over all ranks, tells the share of the signal; sent with the next step."""
        sums = (sum_squares([mean]), sum_squares([packed]))
        if further and self._noted is not None:
            sums = (self._noted[0] + sums[0], self._noted[1] + sums[1])
        self._noted = sums

    def note_newest(
        self,
        squares: Sequence[tuple[Tensor, Tensor]],  # of each parameter group: what ``NewestGradient.squares`` returns
    ) -> None:
        """The same two sums where ballots have moved part of what was packed."""
        means, sums = zip(*squares, strict=True)
        self._noted = (torch.stack(means).sum(), torch.stack(sums).sum())

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        noted = None if self._noted is None else [float(part) for part in self._noted]
        return {"signal_share": self.signal_share, "noted": noted}

    def load(self, state: dict[str, Any] | None) -> None:
        """Take over what :meth:`state` returned; ``None`` forgets everything."""
        self.signal_share = 1.0 if state is None else state["signal_share"]
        noted = None if state is None else state["noted"]
        self._noted = None if noted is None else tuple(torch.tensor(part, dtype=torch.float64) for part in noted)
