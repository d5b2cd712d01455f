"""W data-parallel ranks in one process, made of the package's own parts: what ``zero.py`` does on each, in lockstep.

Parameters are the same on all ranks at all times (that is what ``check_replicas`` checks in a launch), so one model
and one flat buffer serve them all; residuals, masters and moments are each rank's own.
tests/dist/test_quality_equal.py holds this to the real launcher.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepspeed_scape.adams import AdamS
from deepspeed_scape.buffers import Piece, WireBuffers
from deepspeed_scape.config import ScapeOptions
from deepspeed_scape.group import ScapeGroup
from deepspeed_scape.layout import GroupLayout, group_layout, locate
from deepspeed_scape.norms import GradientNorms
from deepspeed_scape.optimizer import Scape
from deepspeed_scape.residual import sum_squares
from evals.quality.exchange import InProcessExchange
from evals.quality.rules import Rules

Gradients = Sequence[Sequence[Tensor | None]]  # [rank][parameter]

ALIGNMENT = 2  # DeepSpeed pads a flat buffer to a multiple of this times W


def flatten(params: Sequence[nn.Parameter], world_size: int) -> Tensor:
    """One flat buffer (P,) that holds the parameters, which become views into it, as DeepSpeed lays them out."""
    unit = ALIGNMENT * world_size
    size = -(-sum(p.numel() for p in params) // unit) * unit
    flat = torch.zeros(size, dtype=params[0].dtype)
    start = 0
    for param in params:
        place = flat[start : start + param.numel()]
        place.copy_(param.data.reshape(-1))
        param.data = place.view_as(param)
        start += param.numel()
    return flat


@dataclass(kw_only=True)
class Rank:
    """What one rank holds for itself."""

    optimizer: Scape
    group: ScapeGroup
    wire: WireBuffers
    norms: GradientNorms


class ScapeRanks:
    """W ranks of SCAPE over one parameter group.

    Args:
        params: the model's parameters; they become views into one flat buffer.
        options: ``optimizer.params`` of the DeepSpeed JSON.
        world_size: W.
        clip: DeepSpeed's ``gradient_clipping``, 0 for none.
        rules: what an ablation does otherwise (see ``rules.py``).
    """

    def __init__(
        self, params: Sequence[nn.Parameter], options: ScapeOptions, world_size: int, clip: float, rules: Rules
    ) -> None:
        if options.ballots and not rules.late_mask:
            raise ValueError("ballots = true is not made for the rule of a fresh mask: votes are cast after the pack")
        self.options, self.clip, self.rules, self.world_size = options, clip, rules, world_size
        self.exchange = InProcessExchange(world_size)
        self.flat = flatten(params, world_size)
        names = [str(i) for i in range(len(params))]
        layout = group_layout(locate(params, names, self.flat), self.flat.numel(), world_size, options)
        self.ranks = [self._build_rank(layout, number) for number in range(world_size)]
        self.step_count = 0
        self.stats: dict[str, float] = {}
        self.visits = torch.zeros(layout.numel, dtype=torch.int32)  # (P,) how often each element was synchronised
        self.skipped = 0

    def _build_rank(self, layout: GroupLayout, number: int) -> Rank:
        size = layout.partition_size
        master = nn.Parameter(self.flat[number * size : (number + 1) * size].float().clone())
        optimizer = Scape([master], **self.options.model_dump())
        optimizer.state[master] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros(size),
            "exp_avg_sq": torch.zeros(size),
        }
        group = self.rules.group(
            layout=layout,
            options=self.options,
            optimizer=optimizer,
            number=0,
            flat=self.flat,
            master=master,
            rank=number,
        )
        wire = WireBuffers([group], self.world_size, self.options.value_torch_dtype)
        return Rank(optimizer=optimizer, group=group, wire=wire, norms=GradientNorms(self.world_size))

    @torch.no_grad()
    def step(self, gradients: Gradients, lr: float) -> None:
        """One optimizer step of all ranks, in the order of ``ScapeZeroOptimizer.step``."""
        self._agree_on_norms(gradients)
        norms = self.ranks[0].norms
        if not norms.finite:
            self.skipped += 1
            self.stats = {"grad_norm": math.inf, "skipped": 1.0}
            return
        step = self.step_count + 1
        dense = self._is_dense(step)
        votes = self.ranks[0].wire.votes and not dense
        for rank, own in zip(self.ranks, gradients, strict=True):
            rank.optimizer.param_groups[0]["lr"] = lr
            if votes:
                rank.group.before_accumulate()
            rank.group.accumulate(list(own), norms.coefficient)
        if not dense and (self.ranks[0].group.position is None or not self.rules.late_mask):
            self._exchange_masks(step)
        if votes:
            for rank in self.ranks:
                rank.group.before_pack()
        pieces: Sequence[Piece | None] = self.ranks[0].wire.dense_pieces() if dense else [None]
        for i, piece in enumerate(pieces):
            self._update_and_gather(self._pack_and_reduce(piece, step, further=i > 0), piece, step)
        self._count_visits(dense)
        self.step_count = step
        if not self._is_dense(step + 1) and self.rules.late_mask:
            self._exchange_masks(step)
        self.stats = {f"bytes_{purpose}": float(count) for purpose, count in self.exchange.take_sent().items()}
        self.stats |= {"grad_norm": norms.estimate, "grad_norm_rms": norms.rms, "clip_coefficient": norms.coefficient}

    def _is_dense(self, step: int) -> bool:
        return self.options.sparsity == 0 or step <= self.options.warmup_steps

    def _agree_on_norms(self, gradients: Gradients) -> None:
        device = self.flat.device
        terms = []
        for rank, own in zip(self.ranks, gradients, strict=True):
            local = [sum_squares([g for g in own if g is not None], device)]
            terms.append(rank.norms.terms(local, device))
        totals = self.exchange.sum_scalars(terms)
        for rank in self.ranks:
            rank.norms.learn(totals)
            rank.norms.judge(self.clip, 1.0)

    def _pack_and_reduce(self, piece: Piece | None, step: int, further: bool) -> list[Tensor]:  # W x (K,) fp32
        messages = []
        for rank in self.ranks:
            packed, (part,) = rank.wire.send_buffer(piece)
            rank.group.pack(part, None if piece is None else piece[0])
            messages.append(packed)
        votes = self.ranks[0].wire.votes and piece is None
        if votes:
            ballots = self.exchange.all_to_all([rank.wire.cast_ballots(step) for rank in self.ranks], "ballots")
            for rank, received in zip(self.ranks, ballots, strict=True):
                rank.wire.count_ballots(received)
        means = self.exchange.reduce_mean(messages)
        for rank, packed, mean in zip(self.ranks, messages, means, strict=True):
            if votes:
                rank.norms.note_newest([rank.group.newest_squares(mean, step)])
            else:
                rank.norms.note_synchronised(packed, mean, further)
        return means

    def _update_and_gather(self, means: list[Tensor], piece: Piece | None, step: int) -> None:
        rows, columns = [], None if piece is None else piece[0]
        for rank, mean in zip(self.ranks, means, strict=True):
            own, (part,) = rank.wire.param_buffer(piece)
            rank.group.update(rank.wire.split_mean(mean, piece)[0], step, columns, part)
            rows.append(own)
        gathered = self.exchange.all_gather(rows, "params")
        first = self.ranks[0]
        first.group.scatter(first.wire.split_params(gathered, piece)[0], columns)

    def _count_visits(self, dense: bool) -> None:
        position = self.ranks[0].group.position
        if dense or position is None:
            self.visits.add_(1)
        else:
            self.visits.index_add_(0, position, torch.ones_like(position, dtype=torch.int32))

    def _exchange_masks(self, step: int) -> None:
        """Every owner selects; all take the masks over. In a launch the gather would be in flight meanwhile."""
        own = [rank.wire.encode_next_masks(step) for rank in self.ranks]
        gathered = self.exchange.all_gather(own, "mask")
        (masks,) = self.ranks[0].wire.decode_masks(gathered)
        for rank in self.ranks:
            rank.group.use_masks(masks)

    def residual_norm(self) -> float:
        """Root mean square over the ranks of ||residual||."""
        total = sum(float(rank.group.residual.state().double().square().sum()) for rank in self.ranks)
        return math.sqrt(total / self.world_size)


class DenseRanks:
    """W ranks of a dense optimizer: its step on the mean gradient, clipped by the norm of that mean.

    Args:
        params: the model's parameters.
        optimizer: an AdamW or AdamS over them.
        world_size: W.
        clip: DeepSpeed's ``gradient_clipping``, 0 for none.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, world_size: int, clip: float
    ) -> None:
        self.params, self.optimizer, self.world_size, self.clip = list(params), optimizer, world_size, clip
        self.stats: dict[str, float] = {}
        self.visits: Tensor | None = None
        self.skipped = 0

    @torch.no_grad()
    def step(self, gradients: Gradients, lr: float) -> None:
        """One optimizer step on the mean gradient."""
        for param, *grads in zip(self.params, *gradients, strict=True):
            total = grads[0]
            for grad in grads[1:]:
                total = total + grad  # type: ignore[operator]
            param.grad = total / self.world_size  # type: ignore[operator]
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.params if p.grad is not None])
        if not torch.isfinite(norm):
            self.skipped += 1
            self._drop_gradients()
            return
        if self.clip > 0:
            torch.nn.utils.clip_grads_with_norm_(self.params, self.clip, norm)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        self._drop_gradients()
        self.stats = {"grad_norm": float(norm)}

    def _drop_gradients(self) -> None:
        """The next backward would add to what is left in ``param.grad``."""
        for param in self.params:
            param.grad = None


def dense_optimizer(kind: str, params: Sequence[nn.Parameter], options: dict[str, object]) -> torch.optim.Optimizer:
    """AdamW as ``torch_adam`` gives it, or AdamS, from ``optimizer.params`` of the JSON."""
    given = {key: value for key, value in options.items() if key != "torch_adam"}
    given["betas"] = tuple(given["betas"])  # type: ignore[arg-type]
    return {"AdamW": torch.optim.AdamW, "AdamS": AdamS}[kind](params, **given)  # type: ignore[operator]
