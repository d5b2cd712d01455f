"""One parameter group on one rank: who holds which tensor, and what each part of a step does to it.

every rank   residual (P,)   replica flat (P,)   mask in use (W, K)
owner        master, exp_avg, exp_avg_sq (S,) fp32   last (S,) int32
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepspeed_scape.adams import Hyper
from deepspeed_scape.ballots import BallotCode, ballot_code, cast_ballots, count_ballots
from deepspeed_scape.config import ScapeOptions
from deepspeed_scape.decay import DecayHistory
from deepspeed_scape.encoding import choose_code, encode_mask
from deepspeed_scape.host_residual import residual_for
from deepspeed_scape.kernels import ops_for
from deepspeed_scape.layout import GroupLayout
from deepspeed_scape.mask import LastThreshold, Moments, select
from deepspeed_scape.newest import NewestGradient
from deepspeed_scape.pages import zeros
from deepspeed_scape.residual import Residual, scatter_params


class ScapeGroup:
    """State and steps of one parameter group.

    Args:
        layout: sizes and places.
        options: the run's options.
        optimizer: holds lr, betas, eps, weight_decay of the group, and the moments "exp_avg" and "exp_avg_sq", (S,)
            fp32 each, as the state of ``master``.
        number: which of the optimizer's parameter groups this is.
        flat: (P,) model dtype, this rank's replica.
        master: (S,) fp32 parameter, this owner's weights.
        rank: this rank's partition.
    """

    def __init__(
        self,
        *,
        layout: GroupLayout,
        options: ScapeOptions,
        optimizer: torch.optim.Optimizer,
        number: int,
        flat: Tensor,
        master: Tensor,
        rank: int,
    ) -> None:
        self.layout, self.options, self.rank = layout, options, rank
        self.optimizer, self.number, self.flat, self.master = optimizer, number, flat, master
        self.code = choose_code(layout, options)
        votes = options.ballots and layout.world_size > 1
        self.ballot: BallotCode | None = ballot_code(layout.partition_size, layout.kept) if votes else None
        self._newest: NewestGradient | None = None  # of this step, with ballots
        device = flat.device
        self.residual: Residual = residual_for(layout, options, rank, device)
        self.last = zeros(layout.partition_size, torch.int32, device)
        self.threshold = LastThreshold()
        self.decay = DecayHistory(device)
        self.visits: Tensor | None = None  # (S,) int32: how many masks an element was in, where counted
        self.position: Tensor | None = None  # (W*K,) int64: the mask as places in the flat buffer, None until made

    @property
    def hyper_group(self) -> dict[str, Any]:  # looked up each time: loading a checkpoint replaces the dicts
        return self.optimizer.param_groups[self.number]

    @property
    def moments(self) -> dict[str, Any]:
        return self.optimizer.state[self.master]

    def kept(self, dense: bool) -> int:
        """Elements of a partition that a step sends: K, or S in a dense step."""
        return self.layout.partition_size if dense else self.layout.kept

    def accumulate(self, grads: list[Tensor | None], scale: float) -> None:
        """Add this rank's scaled gradients, one per slot of the layout, to the residual."""
        pairs = [(g, slot.start) for slot, g in zip(self.layout.slots, grads, strict=True) if g is not None]
        self.residual.accumulate([grad for grad, _ in pairs], [start for _, start in pairs], scale)

    def before_accumulate(self) -> None:
        """With ballots, in a step that uses a mask: remember what the own gradient will be told by."""
        own = None if self.position is None else self._own_mask()
        self._newest = NewestGradient(self.residual.partition(self.rank), own)

    def before_pack(self) -> None:
        """The other half of :meth:`before_accumulate`, once the mask is there."""
        assert self._newest is not None
        self._newest.take(self.residual.partition(self.rank), self._own_mask())

    def newest_squares(self, mean: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """What this owner says of ||mean g||^2 and W ||g||^2 (see ``newest.py``), before the update of ``step``."""
        newest, self._newest = self._newest, None
        assert newest is not None
        return newest.squares(mean, step - self.last.index_select(0, self._own_mask()), self.layout.world_size)

    # What a message carries is the mask in use, K of each partition, or in a dense step some ``columns``, the same
    # stretch of every partition: a dense step goes in pieces, so that no buffer is of size P.

    def pack(self, out: Tensor, columns: slice | None = None) -> None:
        """Move the masked entries of the residual, or those columns, into ``out`` (W, K)."""
        self.residual.pack(self._made(), out) if columns is None else self.residual.take(columns, out)

    def update(self, mean: Tensor, step: int, columns: slice | None = None, out: Tensor | None = None) -> Tensor:
        """Apply the synchronised gradients (K,) fp32 on the owner; return the K new weights, in ``out`` if given."""
        if self.decay.steps != step:  # the first piece of this step; `record` refuses any but the next
            self.decay.record(step, float(self.hyper_group["lr"]), float(self.hyper_group["weight_decay"]))
        hyper = Hyper.of_group(self.hyper_group, self.options.normalizer)
        states = (self.master.data, self.moments["exp_avg"], self.moments["exp_avg_sq"])
        last, own = self.last, None
        if columns is None:
            own = self._own_mask()
        else:
            states, last = (states[0][columns], states[1][columns], states[2][columns]), last[columns]
        self.moments["step"].fill_(step)
        if self.visits is not None and own is not None:
            self.visits.index_add_(0, own, self._ones)
        out = torch.empty_like(mean) if out is None else out
        ops_for(mean, *states).update(own, mean, step, states, last, self.decay, hyper, out)
        return out

    def _own_mask(self) -> Tensor:  # (K,) int64 within the partition
        return self._made().view(self.layout.world_size, -1)[self.rank] - self.rank * self.layout.partition_size

    def count_visits(self) -> None:
        """Count from now on how often each element of the own partition is in the mask: 4 S bytes."""
        self.visits = torch.zeros_like(self.last)
        self._ones = torch.ones(self.layout.kept, dtype=torch.int32, device=self.last.device)

    def own_visits(self) -> Tensor:
        """(n,) int32: the counts of the partition's real elements, its padding left out. Raises if none are kept."""
        if self.visits is None:
            raise RuntimeError("visits are not counted; set diagnostics_every")
        end = max((slot.start + slot.numel for slot in self.layout.slots), default=0)
        return self.visits[: max(0, end - self.rank * self.layout.partition_size)]

    def visited_at(self, step: int, dense: bool) -> Tensor:
        """() int64: how many elements of the mask in use (of all, in a dense step) were last visited at ``step``."""
        last = self.last if dense else self.last.index_select(0, self._own_mask())
        return (last == step).sum()

    def scatter(self, values: Tensor, columns: slice | None = None) -> None:
        """Write the gathered new parameters (W, K), model dtype, into the replica."""
        if columns is None:
            scatter_params(self.flat, self._made(), values)
        else:
            self.flat.view(self.layout.world_size, -1)[:, columns].copy_(values)

    def select(self, step: int) -> Tensor:
        """(K,) int64: the elements of this owner's partition that should be sent next."""
        return select(self._scored(), step, self._beta1, self.layout.kept, self.options, self.threshold)

    def encode_next_mask(
        self,
        step: int,
        out: Tensor,  # (nbytes,) uint8, written
    ) -> None:
        """Select, and write the mask as it travels; block selection does both in one pass."""
        if self.code.kind == "offset":
            ops_for(out).block_top_k(self._scored(), step, self._beta1, self.code, out)
        else:
            encode_mask(self.select(step), self.code, out)

    def cast_ballots(
        self,
        step: int,
        out: Tensor,  # (W, nbytes) uint8, written but for this rank's own row
    ) -> None:
        """Move some of the largest gradients that stay unsent after this step's pack to their owners."""
        assert self.ballot is not None
        for first, stop in ((0, self.rank), (self.rank + 1, self.layout.world_size)):
            rows = self.residual.partitions(first, stop)
            cast_ballots(rows, self._known(), step, self.ballot, self.options.seed, out[first:stop])

    def count_ballots(
        self,
        received: Tensor,  # (W, nbytes) uint8: every rank's ballot for this partition
        faults: Tensor | None = None,
    ) -> None:
        """Take in what the other ranks have moved here, for the score of the next mask."""
        assert self.ballot is not None
        count_ballots(self.residual.partition(self.rank), received, self.rank, self.ballot, faults)

    def _known(self) -> Moments:
        return Moments(gradient=self.residual.partition(self.rank), exp_avg=self.moments["exp_avg"], last=self.last)

    def _scored(self) -> Moments:
        """What the score takes for the mean residual: the own one, with ballots a W-th of what has come together."""
        known = self._known()
        if self.ballot is None:
            return known
        return replace(known, gradient=known.gradient.float() / self.layout.world_size)

    @property
    def _beta1(self) -> float:
        return self.hyper_group["betas"][0]

    def use_masks(self, index: Tensor | None) -> None:
        """Put the masks of all owners, (W, K) int64 within each partition, to use from the next pack on."""
        self.position = None if index is None else (index + self._partition_starts()).view(-1)

    def masks(self) -> Tensor:
        """(W, K) int64 within each partition: the masks in use."""
        return self._made().view(self.layout.world_size, self.layout.kept) - self._partition_starts()

    def _partition_starts(self) -> Tensor:  # (W, 1) int64
        return torch.arange(self.layout.world_size, device=self.flat.device).unsqueeze(1) * self.layout.partition_size

    def _made(self) -> Tensor:
        if self.position is None:
            raise RuntimeError("no mask has been made yet")
        return self.position
