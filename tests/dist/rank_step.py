"""Ranks of test_step.py: each function is one check and returns what the test asserts on."""

from __future__ import annotations

import copy
import itertools
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests import worker

COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter",
    "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single", "send", "recv", "isend",
    "irecv", "barrier", "batch_isend_irecv", "all_gather_object", "broadcast_object_list",
)  # fmt: skip


class WatchedWork:
    """A work of torch.distributed that says when it has been waited for."""

    def __init__(self, work: Any, waited: Any) -> None:
        self.work, self.waited = work, waited

    def wait(self, *args: Any) -> Any:
        done = self.work.wait(*args)
        self.waited()
        return done


class Spy:
    """Notes every collective call, and whatever the test itself notes, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._stock = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def __enter__(self) -> Spy:
        for name, stock in self._stock.items():
            setattr(dist, name, self._noting(name, stock))
        return self

    def __exit__(self, *_: object) -> None:
        for name, stock in self._stock.items():
            setattr(dist, name, stock)

    def _noting(self, name: str, stock: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "batch_isend_irecv":
                return self._note_batch(stock, *args)
            on = "mask" if kwargs.get("group") is self.mask_group else "data"
            self.events.append(f"{name}:{on}:{'async' if kwargs.get('async_op') else 'sync'}")
            return stock(*args, **kwargs)

        return call

    def _note_batch(self, stock: Any, batch: list[Any]) -> list[Any]:
        """Note what the batch posts in which order, and whether anybody has waited for all of it yet."""
        kinds = [(op.__name__, len(list(ops))) for op, ops in itertools.groupby(batch, lambda p2p: p2p.op)]
        posted = ", ".join(f"{count} {name}" for name, count in kinds)
        on = {op.group: "mask" if op.group is self.mask_group else "data" for op in batch}
        at, pending = len(self.events), len(batch)
        self.events.append(f"{posted}:{'+'.join(on.values())}:in flight")

        def waited() -> None:
            nonlocal pending
            pending -= 1
            if pending == 0:
                self.events[at] = self.events[at].replace("in flight", "waited")

        return [WatchedWork(work, waited) for work in stock(batch)]

    def watch(self, engine: Any) -> None:
        exchange = engine.optimizer.exchange
        self.mask_group = exchange.mask_group
        wait = exchange.wait_mask
        exchange.wait_mask = lambda: (self.events.append("wait_mask"), wait())[1]
        select = engine.optimizer.wire.encode_next_masks
        engine.optimizer.wire.encode_next_masks = lambda step: (self._note_select(), select(step))[1]

    def _note_select(self) -> None:
        flying = sum(event.endswith("in flight") for event in self.events)
        self.events.append(f"select under {flying}")


def order(rank: int) -> dict[str, Any]:
    """Events of the 2nd optimizer step, for one and for four parameter groups, with three micro-steps each."""
    from tests.dist import tiny

    out = {}
    for groups, overlap, ballots in ((1, True, ""), (4, True, ""), (1, False, ""), (4, True, "p2p"), (4, True, "nccl")):
        model = tiny.TinyNet()
        params = list(model.parameters())
        split = [{"params": params}] if groups == 1 else [{"params": params[i::4]} for i in range(4)]
        voting = {"ballots": True} if ballots else {}
        settings = tiny.config(sparsity=0.9, overlap_comm=overlap, top={"gradient_accumulation_steps": 3}, **voting)
        engine = tiny.start(settings, model, split)
        if ballots == "nccl":  # the collectives of a GPU, which gloo has too
            engine.optimizer.exchange.point_to_point = False
        tiny.train_step(engine, 0, rank)
        spy = Spy()
        spy.watch(engine)
        with spy:
            for micro in range(3):
                spy.events.append(f"micro{micro}")
                engine.backward(engine(tiny.batch(1, rank, micro)))
                spy.events.append("step")
                engine.step()
            spy.events.append("end")
        out[f"{groups}-{overlap}{ballots}"] = list(spy.events)  # destroy() waits for the mask too
        engine.destroy()
    return out


def late_mask(rank: int) -> dict[str, Any]:
    """Is the mask that step t packs with the one made at the end of step t-1, from the state of t-1?"""
    from tests.dist import tiny

    engine = tiny.start(tiny.config(sparsity=0.9))
    group = engine.optimizer.scape_groups[0]
    tiny.train_step(engine, 0, rank)
    agree = []
    for step in range(1, 6):
        made = group.select(engine.optimizer.applied_steps)  # from the state at the end of step t-1
        tiny.train_step(engine, step, rank)
        agree.append(torch.equal(group.last.nonzero().squeeze(1)[group.last[group.last > 0] == step + 1], made))
    engine.destroy()
    return {"agree": agree}


def replicas(rank: int, dtype: str, steps: int) -> dict[str, Any]:
    """After many steps: are replicas bitwise equal, and is each master, cast, its replica?"""
    from tests.dist import tiny

    top = {"fp16": {"enabled": True, "initial_scale_power": 8}} if dtype == "fp16" else {}
    settings = tiny.config(dtype=dtype, sparsity=0.9, check_replicas=100, weight_decay=0.01, lr=3e-3, top=top)
    engine = tiny.start(settings)
    first = tiny.train_step(engine, 0, rank)
    for step in range(1, steps):
        last = tiny.train_step(engine, step, rank)
    flat = engine.optimizer.bit16_groups_flat[0]
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    size = flat.numel() // len(everyone)
    own = flat[rank * size : (rank + 1) * size]
    master = engine.optimizer.single_partition_of_fp32_groups[0]
    result = {
        "kind": type(engine.optimizer).__name__,
        "dtype": str(flat.dtype),
        "equal": all(torch.equal(other, flat) for other in everyone),
        "master": torch.equal(master.detach().to(flat.dtype), own),
        "first": first,
        "last": last,
        "applied": engine.optimizer.applied_steps,
        "skipped": engine.skipped_steps,
    }
    engine.destroy()
    return result


def corrupt(rank: int) -> dict[str, str]:
    """What check_replicas says when a replica, and when a master, goes wrong on rank 1."""
    from deepspeed_scape.replicas import ReplicaMismatch
    from tests.dist import tiny

    said = {}
    for what in ("replica", "master"):
        engine = tiny.start(tiny.config(sparsity=0.9, check_replicas=2))
        tiny.train_step(engine, 0, rank)
        if rank == 1:
            target = engine.module.up.bias.data if what == "replica" else engine.optimizer.scape_groups[0].master.data
            target[-3 if what == "replica" else target.numel() // 2] += 1e-3
        try:
            tiny.train_step(engine, 1, rank)
            said[what] = "nothing"
        except ReplicaMismatch as error:
            said[what] = str(error)
        engine.destroy()
    return said


def _snapshot(engine: Any) -> list[torch.Tensor]:
    engine.optimizer.finish_mask()
    tensors = []
    for group in engine.optimizer.scape_groups:
        tensors += [group.residual.state(), group.last, group.position, group.master.data, group.flat]
        tensors += [group.moments["exp_avg"], group.moments["exp_avg_sq"]]
    return [t.clone() for t in tensors]


def overflow(rank: int, dtype: str, stage: int, accumulate: str | None) -> dict[str, Any]:
    """A nan on rank 1 only, then an inf on rank 0 only: nothing may change, and training must go on."""
    from tests.dist import tiny

    top: dict[str, Any] = {"data_types": {"grad_accum_dtype": accumulate}} if accumulate else {}
    if dtype == "fp16":
        top["fp16"] = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1}
    engine = tiny.start(tiny.config(stage, dtype, sparsity=0.9, top=top))
    losses = [tiny.train_step(engine, step, rank) for step in range(5)]
    untouched, skipped, scales = [], [], []
    for bad_rank, factor in ((1, float("nan")), (0, float("inf"))):
        before = _snapshot(engine)
        scales.append(engine.optimizer.loss_scale)
        loss = engine(tiny.batch(5, rank))
        engine.backward(loss * factor if rank == bad_rank else loss)
        engine.step()
        untouched.append(all(torch.equal(a, b) for a, b in zip(before, _snapshot(engine), strict=True)))
        skipped.append(engine.skipped_steps)
    losses += [tiny.train_step(engine, step, rank) for step in range(6, 60)]
    result = {
        "kind": type(engine.optimizer).__name__,
        "untouched": untouched,
        "skipped": skipped,
        "applied": engine.optimizer.applied_steps,
        "scale_halved": engine.optimizer.loss_scale < scales[0],
        "losses": [sum(losses[:5]) / 5, sum(losses[-5:]) / 5],
        "waiting": str(engine.optimizer.gradient_accumulation_dtype),
    }
    engine.destroy()
    return result


def huge(rank: int) -> dict[str, list[float]]:
    """A finite gradient whose square is not: with clipping it is clipped, without it the step is skipped."""
    from tests.dist import tiny

    out = {}
    for clip in (0.0, 1.0):
        engine = tiny.start(tiny.config(sparsity=0.9, top={"gradient_clipping": clip}))
        tiny.train_step(engine, 0, rank)
        engine.backward(engine(tiny.batch(1, rank)) * 1e22)
        engine.step()
        losses = [tiny.train_step(engine, step, rank) for step in range(2, 40)]
        out[str(clip)] = [engine.skipped_steps, losses[0], losses[-1]]
        engine.destroy()
    return out


def engines_leave_nothing(rank: int) -> int:
    """Process groups that three engines, started and destroyed, leave behind beyond those of the first."""
    from tests.dist import tiny

    counts = []
    for _ in range(3):
        engine = tiny.start(tiny.config(sparsity=0.9))
        tiny.train_step(engine, 0, rank)
        engine.destroy()
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts[-1] - counts[0]


def accumulation(rank: int, dtype: str) -> dict[str, float]:
    """Four micro-steps against one of the same samples."""
    from tests.dist import tiny

    top = {"data_types": {"grad_accum_dtype": "fp32"}}
    params = []
    for gas in (4, 1):
        settings = tiny.config(dtype=dtype, sparsity=0.9, top={**top, "gradient_accumulation_steps": gas})
        settings["train_micro_batch_size_per_gpu"] = tiny.BATCH * 4 // gas
        engine = tiny.start(settings)
        for step in range(20):
            samples = [tiny.batch(step, rank, micro) for micro in range(4)]
            for pairs in samples if gas == 4 else [torch.cat(samples)]:
                engine.backward(engine(pairs))
                engine.step()
        params.append(tiny.flat_params(engine).clone())
        engine.destroy()
    return {"difference": float((params[0] - params[1]).norm() / params[1].norm())}


def schedules(rank: int) -> dict[str, Any]:
    """Learning rates in effect under a DeepSpeed and a torch schedule; a skipped step must not move the schedule."""
    from tests.dist import tiny

    warm = {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2,
                                                         "warmup_num_steps": 10, "warmup_type": "linear"}}}  # fmt: skip
    engine = tiny.start(tiny.config(sparsity=0.9, top=warm))
    deepspeed_lrs = []
    for step in range(12):
        deepspeed_lrs.append(engine.get_lr()[0])
        tiny.train_step(engine, step, rank)
    engine.destroy()
    engine = tiny.start(
        tiny.config(sparsity=0.9),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1)),
    )
    torch_lrs = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            torch_lrs.append(engine.get_lr()[0])
            loss = engine(tiny.batch(step, rank))
            engine.backward(loss * float("nan") if step == 1 else loss)
            engine.step()
    told = [str(warning.message) for warning in caught if "lr_scheduler" in str(warning.message)]
    recorded = engine.optimizer.scape_groups[0].decay.steps
    engine.destroy()
    return {"deepspeed": deepspeed_lrs, "torch": torch_lrs, "recorded": recorded, "told": told}


class OddNet(nn.Module):
    """Frozen, tied, unused, zero-sized, one-element and odd-sized parameters."""

    def __init__(self) -> None:
        super().__init__()
        from tests.dist.tiny import VOCAB

        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCAB, 7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.gain = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(pairs[:, 0])
        hidden = hidden + torch.tanh(self.frozen(hidden))
        logits = self.gain * (hidden @ self.embed.weight.t()) + self.bias  # the head is tied
        return nn.functional.cross_entropy(logits, pairs[:, 1])


def odd_parameters(rank: int) -> dict[str, Any]:
    """OddNet in four groups, one of a single element: dense against a plain torch AdamS, then sparse."""
    from deepspeed_scape import AdamS
    from tests.dist import tiny

    world = dist.get_world_size()
    out: dict[str, Any] = {}
    for sparsity in (0.0, 0.9):
        model = OddNet()
        reference = copy.deepcopy(model)

        def groups(net: OddNet) -> list[dict[str, Any]]:
            return [
                {"params": [net.embed.weight, net.empty], "lr": 1e-2, "weight_decay": 0.1},
                {"params": [net.gain], "lr": 2e-3},
                {"params": list(net.frozen.parameters())},
                {"params": [net.bias, *net.unused.parameters()], "lr": 5e-3},
            ]

        engine = tiny.start(tiny.config(normalizer="adams", sparsity=sparsity), model, groups(model))
        plain = AdamS(
            [{**g, "params": [p for p in g["params"] if p.requires_grad]} for g in groups(reference)], lr=1e-2
        )
        for step in range(30):
            loss = tiny.train_step(engine, step, rank)
            if step == 0:
                first = loss
            plain.zero_grad()
            (sum(reference(tiny.batch(step, other)) for other in range(world)) / world).backward()
            plain.step()
        pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
        differ = {name: float((a - b).abs().max()) if a.numel() else 0.0 for (name, a), b in pairs}
        everyone = [torch.empty_like(model.embed.weight) for _ in range(world)]
        dist.all_gather(everyone, model.embed.weight.data)
        out[str(sparsity)] = {
            "differ": differ,
            "shape": list(model.empty.shape),
            "frozen": torch.equal(model.frozen.weight, OddNet().frozen.weight),
            "unused": torch.equal(model.unused.weight, OddNet().unused.weight),
            "equal": all(torch.equal(e, everyone[0]) for e in everyone),
            "groups": len(engine.optimizer.scape_groups),
            "losses": [first, loss],
        }
        engine.destroy()
    return out


def gradients(rank: int) -> dict[str, Any]:
    """safe_get_full_grad must give every rank the mean gradient."""
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
    )

    from tests.dist import tiny

    engine = tiny.start(tiny.config(sparsity=0.9))
    engine.backward(engine(tiny.batch(0, rank)))
    reference = tiny.TinyNet()
    world = dist.get_world_size()
    (sum(reference(tiny.batch(0, other)) for other in range(world)) / world).backward()
    pairs = list(zip(engine.module.parameters(), reference.parameters(), strict=True))
    grads = max(float((safe_get_full_grad(a) - b.grad).abs().max()) for a, b in pairs)
    for param, _ in pairs:  # what one has read one may change, on all ranks alike
        safe_set_full_grad(param, 2 * safe_get_full_grad(param))
    doubled = max(float((safe_get_full_grad(a) - 2 * b.grad).abs().max()) for a, b in pairs)
    with torch.no_grad():
        safe_set_full_fp32_param(engine.module.down.bias, torch.full_like(engine.module.down.bias, 3.0))
    everywhere = bool((engine.module.down.bias == 3.0).all())
    engine.step()
    masters = max(float((safe_get_full_fp32_param(a) - a).abs().max()) for a, _ in pairs)
    moment = sum(float(safe_get_full_optimizer_state(a, "exp_avg").abs().sum()) for a, _ in pairs)
    try:
        engine.optimizer.average_tensor(torch.zeros(1), torch.float32)
        dense = "ran"
    except RuntimeError as error:
        dense = str(error)
    engine.destroy()
    return {
        "everywhere": everywhere,
        "grads": grads,
        "doubled": doubled,
        "masters": masters,
        "moment": moment,
        "dense": dense,
    }


def monitors(rank: int) -> dict[str, float]:
    """What DeepSpeed's CSV monitor wrote of ours on rank 0, beside the dict."""
    from tests.dist import tiny

    folder = Path(f"{os.environ['SCAPE_TEST_OUT']}.csv")
    csv = {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "job"}}
    engine = tiny.start(tiny.config(sparsity=0.9, top={**csv, "wall_clock_breakdown": True}))
    for step in range(3):
        tiny.train_step(engine, step, rank)
    stats = engine.optimizer.step_stats
    engine.destroy()
    if rank:
        return {}
    files = sorted(folder.glob("**/Train_Scape_*.csv"))
    written = {f.stem.removeprefix("Train_Scape_"): float(f.read_text().split()[-1].split(",")[-1]) for f in files}
    return {name: value for name, value in written.items() if value == stats[name]}


def main() -> None:
    rank, world = worker.init()
    wanted = worker.args()[0]
    if wanted == "long":
        worker.report({dtype: replicas(rank, dtype, 1000) for dtype in ("fp32", "bf16", "fp16")})
        return
    cases = [("fp32", 2, None), ("bf16", 2, None), ("bf16", 1, "fp32"), ("bf16", 2, "fp32"), ("fp16", 1, None)]
    result: dict[str, Any] = {
        "order": order(rank),
        "late_mask": late_mask(rank),
        "corrupt": corrupt(rank),
        "overflow": {f"{d}-zero{s}-{a}": overflow(rank, d, s, a) for d, s, a in cases},
        "accumulation": {dtype: accumulation(rank, dtype) for dtype in ("fp32", "bf16")},
        "schedules": schedules(rank),
        "odd": odd_parameters(rank),
        "gradients": gradients(rank),
        "monitors": monitors(rank),
        "huge": huge(rank),
        "leaked": engines_leave_nothing(rank),
    }
    worker.report(result)


if __name__ == "__main__":
    main()
