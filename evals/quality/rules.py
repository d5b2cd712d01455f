"""What an ablation does otherwise than the package, by hooks, so that the package has no switch that no user wants.

One process makes one run, so a rule may also set a constant of the package before the run begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_scape import adams
from deepspeed_scape.group import ScapeGroup
from deepspeed_scape.mask import select_top


class RawGradientMask(ScapeGroup):
    """Score = |this step's own gradient|: no residual and no first moment in it."""

    def accumulate(self, grads: list[Tensor | None], scale: float) -> None:
        super().accumulate(grads, scale)
        size = self.layout.partition_size
        newest = torch.zeros(self.layout.numel)
        for slot, grad in zip(self.layout.slots, grads, strict=True):
            if grad is not None:
                newest[slot.start : slot.start + slot.numel] = grad.reshape(-1)
        self.newest = newest[self.rank * size : (self.rank + 1) * size].abs_()  # (S,)

    def select(self, step: int) -> Tensor:
        return select_top(self.newest, self.layout.kept)


class ResidualMask(ScapeGroup):
    """Score = |residual|: what is unsent, without the first moment."""

    @property
    def _beta1(self) -> float:  # of the score alone: with 0 the pending moment is the residual
        return 0.0


class LongMomentumMask(ScapeGroup):
    """The score's momentum constant at 0.95, the update's as it was."""

    @property
    def _beta1(self) -> float:
        return 0.95


class NoResidual(ScapeGroup):
    """No error feedback: what a step does not send is dropped, and a visit is worth one step's gradient.

    The score for the next mask still sees this step's unsent gradient. Decay of the skipped steps is dropped too.
    """

    def accumulate(self, grads: list[Tensor | None], scale: float) -> None:
        self.residual.zero()
        super().accumulate(grads, scale)

    def update(self, mean: Tensor, step: int, columns: slice | None = None, out: Tensor | None = None) -> Tensor:
        own = _own(self, columns)
        square = self.moments["exp_avg_sq"]
        first = self.last[own] == 0
        square[own] = torch.where(first, mean.square(), square[own])  # v = s2 at the first visit, as in the design
        self.last[own] = step - 1
        return super().update(mean, step, columns, out)


class FirstRealVisit(ScapeGroup):
    """ "First visit" is v == 0, not last == 0: a visit with a zero gradient leaves nothing to average with."""

    def update(self, mean: Tensor, step: int, columns: slice | None = None, out: Tensor | None = None) -> Tensor:
        own = _own(self, columns)
        square = self.moments["exp_avg_sq"]
        second = mean.square() / (step - self.last[own])
        square[own] = torch.where(square[own] == 0, second, square[own])  # the mean of s2 and s2 is s2
        return super().update(mean, step, columns, out)


class LargestNormalizer(ScapeGroup):
    """d from max(v, s2): a visit's step is never longer than its own gradient allows; v itself goes on as before."""

    def update(self, mean: Tensor, step: int, columns: slice | None = None, out: Tensor | None = None) -> Tensor:
        own = _own(self, columns)
        square = self.moments["exp_avg_sq"]
        delay = (step - self.last[own]).double()
        second = mean.double().square() / delay
        keep = torch.pow(torch.tensor(self.hyper_group["betas"][1], dtype=torch.float64), delay)
        keep.clamp_(min=adams.EMA_FLOOR)
        kept = torch.where(self.last[own] == 0, second, keep * square[own] + (1 - keep) * second)  # v as it should be
        largest = torch.maximum(kept, second)
        square[own] = ((largest - (1 - keep) * second) / keep).float()  # so that the update arrives at `largest`
        done = super().update(mean, step, columns, out)
        square[own] = kept.float()
        return done


class KeptRounding(ScapeGroup):
    """What rounding the sent values to bf16 takes away stays in the residual."""

    def pack(self, out: Tensor, columns: slice | None = None) -> None:
        everything = torch.arange(self.layout.numel)
        position = (
            self._made() if columns is None else everything.view(self.layout.world_size, -1)[:, columns].flatten()
        )
        values = self.residual.state().index_select(0, position)
        super().pack(out, columns)
        rounded = values - out.reshape(-1).to(values.dtype)
        self.residual.load(self.residual.state().index_copy(0, position, rounded))


def _own(group: ScapeGroup, columns: slice | None) -> Tensor:
    """(K,) int64: what an update touches of this owner's partition."""
    return group.masks()[group.rank] if columns is None else torch.arange(group.layout.partition_size)[columns]


def _ema_floor(value: float) -> Callable[[], None]:
    def prepare() -> None:
        adams.EMA_FLOOR = value
        adams._delay_tables.cache_clear()

    return prepare


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a run differs from the package."""

    group: type[ScapeGroup] = ScapeGroup
    late_mask: bool = True  # False: a mask is made from, and used on, the gradients of one step
    prepare: Callable[[], None] | None = None  # called before anything is built


RULES: dict[str, Rules] = {
    "": Rules(),
    "fresh mask": Rules(late_mask=False),
    "raw-gradient mask": Rules(group=RawGradientMask),
    "residual mask": Rules(group=ResidualMask),
    "score momentum 0.95": Rules(group=LongMomentumMask),
    "no residual": Rules(group=NoResidual),
    "first real visit": Rules(group=FirstRealVisit),
    "max normalizer": Rules(group=LargestNormalizer),
    "kept rounding": Rules(group=KeptRounding),
    "ema floor 0.8": Rules(prepare=_ema_floor(0.8)),
    "ema floor 0.95": Rules(prepare=_ema_floor(0.95)),
}
