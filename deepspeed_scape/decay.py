"""Lazy weight decay: the decay of the steps in which an element was not visited, applied exactly at its visit."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class DecayHistory:
    """Running sum over the steps of log(1 - lr_tau * wd), for one parameter group.

    The product over (last, t] of (1 - lr_tau wd) is exp(sum[t] - sum[last]); kept in fp64, one value a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(1024, dtype=torch.float64, device=device)  # [tau] = sum over steps 1..tau
        self._total = 0.0  # of the newest step, kept on the host
        self.steps = 0

    def record(self, step: int, lr: float, weight_decay: float) -> None:
        """Note the decay of ``step``; steps come one by one.

        Raises:
            ValueError: lr * weight_decay >= 1, which would turn the weights over.
        """
        if step != self.steps + 1:
            raise ValueError(f"decay of step {step} recorded after step {self.steps}")
        if not 0 <= lr * weight_decay < 1:  # also true of a nan
            raise ValueError(f"lr * weight_decay = {lr} * {weight_decay} must be in [0, 1); change one of the two")
        if step >= self._sums.numel():
            self._sums = torch.cat([self._sums, torch.zeros_like(self._sums)])
        self._total += math.log1p(-lr * weight_decay)
        self._sums[step] = self._total
        self.steps = step

    def since(
        self,
        last: Tensor,  # (K,) int32: step of the last visit
    ) -> Tensor | None:  # (K,) fp32, or None where nothing has ever decayed
        """Log of the decay since each element's last visit, up to the newest recorded step."""
        if self._total == 0.0:
            return None
        return (self._total - self._sums.index_select(0, last)).to(torch.float32)

    def products(self) -> Tensor:
        """(steps + 1,) fp32: product of the decay factors after each step; empty where nothing has ever decayed."""
        if self._total == 0.0:
            return torch.empty(0)
        return (self._total - self._sums[: self.steps + 1]).exp_().to(torch.float32)

    def state(self) -> Tensor:
        """(steps + 1,) fp64 on the CPU, for a checkpoint."""
        return self._sums[: self.steps + 1].cpu().clone()

    def load(self, sums: Tensor) -> None:
        """Take over what :meth:`state` returned."""
        self.steps = sums.numel() - 1
        capacity = 1 << max(10, (self.steps + 1).bit_length())
        self._sums = torch.zeros(capacity, dtype=torch.float64, device=self._sums.device)
        self._sums[: self.steps + 1] = sums.to(self._sums.device)
        self._total = float(sums[-1])
