"""The ZeRO stage-1/2 subclass: DeepSpeed's hooks, and the order of one step.

    gradient -> residual -> pack -> reduce -> update -> gather -> replica
                                              `-> score -> mask -> next step

DeepSpeed's own dense reduction is cut off: gradients stay on their rank until the boundary step, so accumulation steps
send nothing, and every dense method raises.
"""

from __future__ import annotations

import atexit
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import log_dist
from torch import Tensor

from deepspeed_scape import checkpoint, faults, gradient_views, reshard
from deepspeed_scape.agreement import all_or_none
from deepspeed_scape.backward import keep_gradient, refuse_unseen
from deepspeed_scape.buffers import Piece, WireBuffers
from deepspeed_scape.diagnostics import Diagnostics
from deepspeed_scape.exchange import Exchange
from deepspeed_scape.group import ScapeGroup
from deepspeed_scape.layout import group_layout, locate
from deepspeed_scape.monitor import StepMonitor, collect_stats, sent_share
from deepspeed_scape.norms import GradientNorms
from deepspeed_scape.optimizer import Scape
from deepspeed_scape.pages import zeros
from deepspeed_scape.replicas import check_replicas
from deepspeed_scape.residual import sum_squares
from deepspeed_scape.stopwatch import Stopwatch
from deepspeed_scape.streams import wait_for_compute


class ScapeZeroOptimizer(DeepSpeedZeroOptimizer):
    """ZeRO stage 1/2 whose gradient reduction and parameter gather carry ``density`` of the elements.

    Built by DeepSpeed itself when the optimizer is :class:`deepspeed_scape.Scape`.

    Attributes:
        step_stats: after every step, bytes sent by purpose, norms and milliseconds (see ``monitor.py``).
        diagnostics: residual norm, mask overlap, visits every now and then (see ``diagnostics.py``).
        applied_steps: t, the steps that were not skipped.
        visits: how often an element was in the mask so far, on average.
    """

    def __init__(self, init_optimizer: Scape, *args: Any, **kwargs: Any) -> None:
        self.options = init_optimizer.options
        # contiguous_gradients makes DeepSpeed register its gradient hooks at stage 1 too; its buckets are never filled
        kwargs.update(contiguous_gradients=True, overlap_comm=False, reduce_bucket_size=2)
        kwargs["allgather_bucket_size"] = 500_000_000  # used once, after a universal load; others fail an assertion
        super().__init__(init_optimizer, *args, **kwargs)
        self.use_grad_accum_attribute = True  # gradients wait in param.grad_accum, at both stages
        device, patience = self.bit16_groups_flat[0].device, self.options.timeout or None
        self.exchange = Exchange(self.dp_process_group, device, self.options.overlap_comm, patience)
        faults.limit_wait(self.options.timeout, [self.dp_process_group, self.exchange.mask_group])
        self.roster = faults.Roster(self.dp_process_group)
        self.scape_groups = [self._build_group(i) for i in range(len(self.bit16_groups))]
        self.wire = WireBuffers(self.scape_groups, self.exchange.world_size, self.options.value_torch_dtype)
        self.norms = GradientNorms(self.exchange.world_size)
        self.diagnostics = Diagnostics(self.scape_groups, self.options.diagnostics_every, self.exchange.world_size)
        self.applied_steps = 0
        self.visits = 0.0
        self.step_stats: dict[str, float] = {}
        self._diagnosed = False  # whether this step brought new diagnostics
        self.backward_share: Callable[[], float] = lambda: 1.0  # of a gradient; set by the engine that builds us
        self.backward_of_engine: Callable[[], bool] = lambda: False  # under way, and so is its epilogue; set likewise
        self._gradients_taken = False  # some hook has fired since the last step
        self._gradients_wait = False  # between a backward and the step; the same on all ranks
        self._loading_state = False
        self.stopwatch = Stopwatch(self.scape_groups[0].flat.device)
        self.monitor: StepMonitor | None = None  # set by the engine that builds us
        self._link_optimizer_states()
        if self.options.sparsity and self.options.warmup_steps:
            first = f"steps 1 to {self.options.warmup_steps} are dense (warmup_steps)"
            log_dist(f"SCAPE: {first}, those after them send {self.options.density:.4g} of the elements", ranks=[0])
        atexit.register(_close, weakref.ref(self.exchange))

    def _build_group(self, i: int) -> ScapeGroup:
        flat, params = self.bit16_groups_flat[i], self.bit16_groups[i]
        names = [self.param_names.get(param, f"group{i}[{n}]") for n, param in enumerate(params)]
        layout = group_layout(locate(params, names, flat), flat.numel(), self.exchange.world_size, self.options)
        return ScapeGroup(
            layout=layout,
            options=self.options,
            optimizer=self.optimizer,
            number=i,
            flat=flat,
            master=self.single_partition_of_fp32_groups[i],
            rank=self.exchange.rank,
        )

    # ---- DeepSpeed's hooks -------------------------------------------------------------------------------------------

    def initialize_optimizer_states(self) -> None:
        """Moments from the start, so that tools which look for them find them before the first step."""
        for master in self.single_partition_of_fp32_groups:
            self.optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": zeros(master.numel(), master.dtype, master.device),
                "exp_avg_sq": zeros(master.numel(), master.dtype, master.device),
            }

    def setup_buckets(self) -> None:
        """No buckets: nothing is reduced during backward."""

    def process_gradients(self, param: Any, i: int) -> None:
        """Gradient hook: keep this rank's gradient, now or at the end of its backward.

        Between two layers of a model nothing of ours is in a CPU's caches; all at once take a tenth of the time. There
        what needs neither another dtype nor a sum waits in ``param.grad`` where an epilogue is certain to come. After a
        second direct backward of one forward none does.
        """
        self._gradients_taken = True
        waits = self.backward_of_engine() and param.is_cpu and param.dtype == self.gradient_accumulation_dtype
        if not waits or getattr(param, "grad_accum", None) is not None:
            self._keep(param)

    def _keep(self, param: Any) -> None:
        """Take a gradient out of ``param.grad``; it stays on this rank, in the accumulation dtype, until the step."""
        grad = param.grad
        if grad is None:
            return
        if grad.is_sparse:
            raise RuntimeError(f"{self.param_names.get(param)} has a sparse gradient; build it with sparse=False")
        keep_gradient(param, self.gradient_accumulation_dtype, self.backward_share())

    def needs_scaler(self) -> bool:
        """Also where the scale is static: an unscaled loss.backward() would be divided by it all the same."""
        return bool(super().needs_scaler()) or self.loss_scale != 1.0

    def backward_epilogue(self, *args: Any, **kwargs: Any) -> None:
        """Take in what waits in ``param.grad``, also what has reached it without passing a hook."""
        self._gradients_wait = True
        for group in self.bit16_groups:
            for param in group:
                self._keep(param)

    def reduce_ready_partitions_and_remove_grads(self, param: Tensor, i: int) -> None:
        """Nothing to reduce before the step."""

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Nothing to reduce before the step."""

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """Nothing to reduce before the step."""

    def finalize_gradient_accumulation_boundary(self) -> None:
        """The caller owns the boundary: what has accumulated is what the step takes."""
        self.set_gradient_accumulation_boundary(True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait for the step."""
        super().zero_grad(set_to_none)
        for group in self.bit16_groups:
            for param in group:
                param.grad_accum = None
        self._gradients_wait = False
        self._gradients_taken = False

    def destroy(self) -> None:
        """End what is in flight, then what DeepSpeed ends."""
        self.exchange.close()
        self.exchange.destroy()
        super().destroy()

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Bring offloaded states back; the views of them must follow."""
        super().reload_states(*args, **kwargs)
        self._link_optimizer_states()

    def _link_all_hp_params(self) -> None:
        """DeepSpeed's debugging views of masters and moments, and a gradient view that all ranks may ask for."""
        super()._link_all_hp_params()
        for group in self.bit16_groups:
            for param in group:
                gradient_views.attach(param)
        if hasattr(self, "scape_groups"):
            self._link_optimizer_states()

    def _link_optimizer_states(self) -> None:
        self._hp_optimizer_states_linked = False
        self._lazy_init_hp_params_optimizer_state()

    # ---- one step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One optimizer step. A step with an inf or nan gradient on any rank is skipped and changes nothing."""
        if self._gradients_taken and not self._gradients_wait:
            refuse_unseen()
        self.stopwatch.restart()
        scale = self.loss_scale
        with self.roster.watch(f"optimizer step {self.applied_steps + 1}"):
            self._measure_gradients(scale)
            self._update_scale(self.overflow)
            if self.overflow:
                self._global_grad_norm = math.inf
            else:
                self._global_grad_norm = self.norms.estimate / scale
                self._apply_step(self.norms.coefficient / scale)
        self.zero_grad()
        self._collect_stats(scale)

    def _apply_step(self, gradient_scale: float) -> None:
        step = self.applied_steps + 1
        dense = self._is_dense(step)
        votes = self.wire.votes and not dense
        if votes:
            self.finish_mask()
            self.stopwatch.lap("mask_wait")
            for group in self.scape_groups:
                group.before_accumulate()
        for group, grads in zip(self.scape_groups, self._local_gradients(), strict=True):
            group.accumulate(grads, gradient_scale)
        self.zero_grad()
        self.stopwatch.lap("accumulate")
        if not dense:
            self._take_mask(step)
        if votes:
            for group in self.scape_groups:
                group.before_pack()
        self.diagnostics.before_update(step, dense)
        pieces: Sequence[Piece | None] = self.wire.dense_pieces() if dense else [None]
        for i, piece in enumerate(pieces[:-1]):
            self._scatter(self._synchronise(piece, step, further=i > 0)(), piece)
            wait_for_compute(self.scape_groups[0].flat.device)  # or the memory of all pieces would be in use at once
        gathering = self._synchronise(pieces[-1], step, further=len(pieces) > 1)
        masks = None if self._is_dense(step + 1) else self._select(step)  # while the parameters are under way
        self._scatter(gathering(), pieces[-1])
        self.diagnostics.after_step(step, dense)
        if not dense:
            self.visits += sent_share(self.scape_groups, dense)
        self.applied_steps = step
        self.optimizer._opt_called = True  # torch's schedulers warn if nobody has stepped before them
        if masks is not None:
            self._start_mask(masks)
        every = self.options.check_replicas
        if every and step % every == 0:
            check_replicas(self.scape_groups, self.exchange)
            self.stopwatch.lap("check")

    def _is_dense(self, step: int) -> bool:
        return self.options.sparsity == 0 or step <= self.options.warmup_steps

    def _measure_gradients(self, scale: float) -> None:
        """The one scalar all-reduce: the inf/nan verdict, the RMS norm, and the noise terms of the step before."""
        device = self.scape_groups[0].flat.device
        local = [sum_squares([g for g in grads if g is not None], device) for grads in self._local_gradients()]
        terms = self.diagnostics.take_terms()
        learnt = self.norms.agree(local, self.exchange, device, self.wire.mask_faults, terms)
        self._diagnosed = self.diagnostics.learn(learnt)
        self.norms.judge(self.clip_grad, scale)
        self.overflow = not self.norms.finite
        self.stopwatch.lap("norm")

    def _synchronise(self, piece: Piece | None, step: int, further: bool = False) -> Callable[[], Tensor]:
        """Reduce the masked entries, or a piece of a dense step, and update; returns what waits for the parameters."""
        return self._update(self._pack_and_reduce(piece, step, further), piece, step)

    def _pack_and_reduce(self, piece: Piece | None, step: int, further: bool) -> list[Tensor]:
        packed, parts = self.wire.send_buffer(piece)
        for group, part, columns in self._parts(piece, parts):
            group.pack(part, columns)
        self.stopwatch.lap("pack")
        if self.wire.votes and piece is None:
            ballots = self.wire.cast_ballots(step)
            self.stopwatch.lap("ballots")
            mean, received = self.exchange.reduce_with_ballots(packed, ballots)
            means = self.wire.split_mean(mean, piece)
            self.wire.count_ballots(received)
            pairs = zip(self.scape_groups, means, strict=True)
            self.norms.note_newest([group.newest_squares(part, step) for group, part in pairs])
        else:
            mean = self.exchange.reduce_mean(packed)
            means = self.wire.split_mean(mean, piece)
            self.norms.note_synchronised(packed, mean, further)
        self.stopwatch.lap("reduce")
        return means

    def _update(self, means: list[Tensor], piece: Piece | None, step: int) -> Callable[[], Tensor]:
        """Update what this rank owns and start the gather of the new parameters; the result waits for it."""
        own, rows = self.wire.param_buffer(piece)
        for (group, mean, columns), row in zip(self._parts(piece, means), rows, strict=True):
            group.update(mean, step, columns, row)
        self.stopwatch.lap("update")
        gathering = self.exchange.start_param_gather(own)
        self.stopwatch.lap("gather")
        return gathering

    def _parts(self, piece: Piece | None, tensors: list[Tensor]) -> Iterator[tuple[ScapeGroup, Tensor, slice | None]]:
        """Every group with its part of a message, and the columns that it holds; None for those of the mask."""
        return zip(self.scape_groups, tensors, piece or [None] * len(tensors), strict=True)

    def _select(self, step: int) -> Tensor:
        """(B,) uint8: score and select on the owner; it needs the new state, but nobody else's parameters."""
        own = self.wire.encode_next_masks(step)
        self.stopwatch.lap("select")
        return own

    def _scatter(self, gathered: Tensor, piece: Piece | None) -> None:
        self.stopwatch.lap("gather")
        for group, values, columns in self._parts(piece, self.wire.split_params(gathered, piece)):
            group.scatter(values, columns)
        self.stopwatch.lap("scatter")

    def _start_mask(self, own: Tensor) -> None:
        """Start the gather that the next step waits for."""
        self.exchange.start_mask_gather(own, self.wire.decode_masks)
        if not self.exchange.overlap:
            self.finish_mask()

    def finish_mask(self) -> None:
        """Wait for the mask gather in flight, if any, and put the masks to use."""
        if self.exchange.mask_in_flight:
            for group, index in zip(self.scape_groups, self.exchange.wait_mask(), strict=True):
                group.use_masks(index)

    def _take_mask(self, step: int) -> None:
        """The mask made one step ago; the first sparse step of a run without warm-up makes its own."""
        if not self.exchange.mask_in_flight and any(group.position is None for group in self.scape_groups):
            self._start_mask(self._select(step))
        self.finish_mask()
        self.stopwatch.lap("mask_wait")

    def _local_gradients(self) -> list[list[Tensor | None]]:
        return [[getattr(param, "grad_accum", None) for param in group] for group in self.bit16_groups]

    def _collect_stats(self, loss_scale: float) -> None:
        self.step_stats = collect_stats(self, loss_scale)
        if self.monitor is not None:
            self.monitor.write(self.step_stats | (self.diagnostics.latest if self._diagnosed else {}))

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's ZeRO state with one extra key (see ``checkpoint.py``)."""
        checkpoint.refuse_mid_accumulation(self._gradients_wait)
        self.finish_mask()
        return {**super().state_dict(), checkpoint.KEY: checkpoint.save(self)}

    def _load_legacy_checkpoint(
        self, state_dict_list: list[Any], load_optimizer_states: bool = True, load_from_fp32_weights: bool = False
    ) -> None:
        self.finish_mask()
        own: dict[str, Any] = {}
        if load_optimizer_states:
            with all_or_none(self.dp_process_group):  # refuse before anything has changed, on all ranks
                own = checkpoint.own_state(state_dict_list[dist.get_rank(self.dp_process_group)])
                checkpoint.check(own, self)
        self._loading_state = True
        try:
            super()._load_legacy_checkpoint(state_dict_list, load_optimizer_states, load_from_fp32_weights)
        finally:
            self._loading_state = False
        checkpoint.restore(own, self)

    def _restore_from_bit16_weights(self) -> None:
        """Masters from the replica. Outside the loading of our own state the weights are others: start afresh."""
        super()._restore_from_bit16_weights()
        if not self._loading_state:
            self.finish_mask()
            checkpoint.start_afresh(self)

    def _load_universal_checkpoint(
        self, checkpoint_folder: str, load_optimizer_states: bool, load_from_fp32_weights: bool
    ) -> None:
        """Masters, moments and our state at this world size; DeepSpeed then gathers the replicas from the masters.

        DeepSpeed's own loader fails on a rank that holds no element of a group.
        """
        self.finish_mask()
        with all_or_none(self.dp_process_group):
            reshard.load(Path(checkpoint_folder) / "zero", self, load_optimizer_states)


def _close(exchange: weakref.ref[Exchange]) -> None:
    alive = exchange()
    if alive is not None and dist.is_initialized():
        alive.close()


_DENSE_METHODS = (
    "allreduce_and_copy",
    "allreduce_and_copy_with_multiple_ranks",
    "allreduce_and_scatter",
    "allreduce_bucket",
    "allreduce_no_retain",
    "average_tensor",
    "buffered_reduce_fallback",
    "get_flat_partition",
    "gradient_reduction_w_predivide",
    "independent_gradient_partition_epilogue",
    "reduce_independent_p_g_buckets_and_remove_grads",
    "reduce_ipg_grads",
    "scaled_global_norm",
    "unscale_and_clip_grads",
)


def _refuse_dense(name: str) -> Any:
    def refuse(self: ScapeZeroOptimizer, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"dense path reached: {name}() reduces whole gradients, which SCAPE never does")

    return refuse


for _name in _DENSE_METHODS:
    setattr(ScapeZeroOptimizer, _name, _refuse_dense(_name))
