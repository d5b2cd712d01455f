"""What a run should know of its own masks and residuals now and then: counted on the device, read a step later.

Every ``diagnostics_every`` steps each rank counts, on its own device, the terms below. They travel with the next step's
scalar all-reduce, whose result the host reads anyway: no collective, no wait and, on other steps, no byte is added.

    residual_norm    sqrt(mean over ranks of ||r_i||^2) after the step: what is waiting to be sent
    mask_overlap     share of this step's mask that was in the mask of the step before; `density` if masks were random
    visits_hist_<n>  share of the elements that were in n masks or more, but fewer than the next key's n

Visits are counted since the run began, or since the resume from a checkpoint that has no counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_scape.group import ScapeGroup
from deepspeed_scape.residual import chunks

# lower ends of the histogram's bins: none, one, then half octaves (a factor of sqrt 2) up to 65,536
VISIT_BINS = (0, 1, *sorted({math.ceil(2 ** (half / 2)) for half in range(2, 33)}))


class Diagnostics:
    """Counts every ``every`` steps, hands the terms to the scalar all-reduce, and keeps what came back.

    Attributes:
        latest: {"diagnosed_step", "residual_norm", "mask_overlap", "visits_hist_<n>"...}; empty until the first.
    """

    def __init__(self, groups: Sequence[ScapeGroup], every: int, world_size: int) -> None:
        self.groups, self.every, self.world_size = groups, every, world_size
        self.latest: dict[str, float] = {}
        self._overlap: Tensor | None = None  # 0-dim fp64
        self._pending: tuple[int, Tensor] | None = None  # the step, its terms (n,) fp64 on the device
        if every:
            for group in groups:
                group.count_visits()

    def due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def before_update(self, step: int, dense: bool) -> None:
        """Compare this step's mask with the last one, while ``last`` still tells which elements that was."""
        if self.due(step):
            parts = [group.visited_at(step - 1, dense) for group in self.groups]
            self._overlap = torch.stack(parts).sum().double()

    def after_step(self, step: int, dense: bool) -> None:
        """Count the terms of a step that has been applied."""
        if not self.due(step) or self._overlap is None:
            return
        device = self.groups[0].flat.device
        kept = float(sum(group.kept(dense) for group in self.groups))
        residual = torch.stack([group.residual.sum_squares() for group in self.groups]).sum()
        bins = torch.stack([count_visits(group.own_visits()) for group in self.groups]).sum(0)
        sent = torch.full((), kept, dtype=torch.float64, device=device)  # not torch.tensor, which copies from the host
        head = torch.stack([residual.double(), self._overlap, sent])
        self._pending = (step, torch.cat([head, bins]))
        self._overlap = None

    def take_terms(self) -> Tensor | None:
        """This rank's terms (n,) fp64 for the all-reduce, or None when nothing was counted at the last step."""
        return None if self._pending is None else self._pending[1]

    def learn(self, totals: Sequence[float]) -> bool:
        """Take the sums over the ranks; False if none were asked for."""
        if self._pending is None:
            return False
        (step, _), self._pending = self._pending, None
        residual, overlap, sent, *bins = totals
        count = max(1.0, sum(bins))
        self.latest = {
            "diagnosed_step": float(step),
            "residual_norm": math.sqrt(residual / self.world_size) if math.isfinite(residual) else math.inf,
            "mask_overlap": overlap / max(1.0, sent),
        } | {f"visits_hist_{low}": share / count for low, share in zip(VISIT_BINS, bins, strict=True)}
        return True


def count_visits(
    visits: Tensor,  # (n,) int32: how often each real element of a partition was in the mask
) -> Tensor:  # (len(VISIT_BINS),) fp64: how many fall in each bin
    """The histogram, in passes without a temporary of int64: the sizes are known, so the host waits for nothing."""
    counts = torch.zeros(len(VISIT_BINS), dtype=torch.float64, device=visits.device)
    for piece in chunks(visits.numel(), visits.device):
        part = visits[piece]
        at_least = torch.stack([(part >= low).sum() for low in VISIT_BINS])
        counts += at_least
        counts[:-1] -= at_least[1:]
    return counts
