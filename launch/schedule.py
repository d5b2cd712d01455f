"""Learning-rate schedules as a factor of the step, for torch's LambdaLR."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

SCHEDULES = ("constant", "cosine")


def lr_factor(step: int, *, kind: str, warmup: int, steps: int, floor: float) -> float:
    """What the learning rate of 0-based optimizer step `step` is multiplied with.

    A linear warm-up that reaches 1 at step `warmup`, then 1 ("constant") or half a cosine that reaches `floor` at step
    `steps` ("cosine") and stays there.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def lambda_scheduler(*, kind: str, warmup: int, steps: int, floor: float) -> Callable[[Optimizer], LambdaLR]:
    """What `deepspeed.initialize(lr_scheduler=...)` takes: it calls this with the optimizer that it has built."""

    def build(optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda t: lr_factor(t, kind=kind, warmup=warmup, steps=steps, floor=floor))

    return build
