"""Every method that is compared, as a training step on one rank: same model, same data, its own way over the network.

The DeepSpeed ones are real engines with the shipped configuration files, the DDP ones torch's own. Every dense one
runs torch's fused AdamW, the fastest on a CPU, and clips at the shipped configurations' 1.0.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launch.models import next_token_loss

CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
CLIP = 1.0
LR = 1e-4  # for timing alone


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the table. ``kind`` is how it is built: local, mock, ddp or engine."""

    name: str
    title: str
    kind: str
    hook: str = ""  # ddp: "bf16" or "powersgd"
    config: str = ""  # engine: a file of ds_configs
    zero: dict[str, Any] = field(default_factory=dict)  # engine: further keys of zero_optimization
    top: dict[str, Any] = field(default_factory=dict)  # engine: further keys of the configuration
    like: str = ""  # mock: the method whose bytes it sends

    @property
    def is_scape(self) -> bool:
        return "scape" in self.config


_BY_OWNER = {"use_multi_rank_bucket_allreduce": False}
METHODS = {
    m.name: m
    for m in (
        Method(name="compute", title="compute only (the limit)", kind="local"),
        Method(name="ddp", title="DDP", kind="ddp"),
        Method(name="ddp-bf16", title="DDP, bf16 hook", kind="ddp", hook="bf16"),
        Method(name="powersgd", title="DDP, PowerSGD rank 4", kind="ddp", hook="powersgd"),
        Method(name="zero1", title="ZeRO-1", kind="engine", config="zero1_adamw_fp32"),
        Method(name="zero2", title="ZeRO-2", kind="engine", config="zero2_adamw_fp32"),
        Method(
            name="zero2-owner",
            title="ZeRO-2, reduce by owner",
            kind="engine",
            config="zero2_adamw_fp32",
            zero=_BY_OWNER,
        ),
        Method(name="zero2-bf16", title="ZeRO-2 bf16", kind="engine", config="zero2_adamw_bf16"),
        Method(
            name="zero2-bf16-comm",
            title="ZeRO-2, bf16 reduction",
            kind="engine",
            config="zero2_adamw_fp32",
            top={"communication_data_type": "bf16"},
        ),
        Method(name="scape90-z1", title="SCAPE 90%, ZeRO-1", kind="engine", config="zero1_scape90_fp32"),
        Method(name="scape90", title="SCAPE 90%, ZeRO-2", kind="engine", config="zero2_scape90_fp32"),
        Method(name="scape99-z1", title="SCAPE 99%, ZeRO-1", kind="engine", config="zero1_scape99_fp32"),
        Method(name="scape99", title="SCAPE 99%, ZeRO-2", kind="engine", config="zero2_scape99_fp32"),
        Method(name="mock90", title="mock of 90% (the ceiling)", kind="mock", like="scape90"),
        Method(name="mock99", title="mock of 99% (the ceiling)", kind="mock", like="scape99"),
    )
}
ALIKE = tuple(n for n, m in METHODS.items() if m.kind in ("local", "mock") or m.is_scape)  # nothing sent in a backward
CLOSE = ("compute", "scape99-z1", "scape99", "mock99")  # to be within a few percent of each other
PEERS = ("ddp", "ddp-bf16", "powersgd", "zero1", "zero2", "zero2-owner", "zero2-bf16", "zero2-bf16-comm")
SCAPES = tuple(name for name, method in METHODS.items() if method.is_scape)


class Trainable(Protocol):
    """One method on one rank."""

    model: nn.Module
    optimizer: Any
    forward_ms: float  # of the last step
    compute_ms: float  # its forward and backward, with what a method sends under its backward

    def step(self, tokens: Tensor) -> None:  # (B, seq + 1) int64
        """Forward, backward and optimizer step."""

    def finish(self) -> None:
        """Wait for what the last step has left in flight."""

    def stats(self) -> dict[str, float]:
        """What the last step says of itself: counted bytes and milliseconds of its parts."""


def timed(forward: Callable[[], Tensor], backward: Callable[[Tensor], Any]) -> tuple[float, float]:
    """Milliseconds of the forward, and of both."""
    begin = time.perf_counter()
    loss = forward()
    middle = time.perf_counter()
    backward(loss)
    return (middle - begin) * 1e3, (time.perf_counter() - begin) * 1e3


class LocalStep:
    """Forward, backward, clipping and AdamW on this rank's partition, as ZeRO does it, without any network.

    Args:
        model: fp32.
        rank, world: which partition.
        nbytes: a mock's message: after the gradients this rank also sends that many bytes in one dense all-reduce.
    """

    def __init__(self, model: nn.Module, rank: int, world: int, nbytes: int = 0) -> None:
        self.model, self.params = model, list(model.parameters())
        flat = torch.cat([p.detach().reshape(-1) for p in self.params])
        size = -(-flat.numel() // world)
        self.begin, self.end = rank * size, min((rank + 1) * size, flat.numel())
        self.flat, start = flat, 0
        for p in self.params:  # one buffer with views, as DeepSpeed lays it out
            p.data = flat[start : start + p.numel()].view_as(p)
            start += p.numel()
        self.master = nn.Parameter(flat[self.begin : self.end].clone())
        self.optimizer = torch.optim.AdamW([self.master], lr=LR, fused=True)
        # a ring all-reduce of b bytes sends 2 (W-1)/W b
        self.message = torch.zeros(int(nbytes * world / (2 * max(1, world - 1))), dtype=torch.uint8)

    def step(self, tokens: Tensor) -> None:
        self.forward_ms, self.compute_ms = timed(lambda: next_token_loss(self.model, tokens), Tensor.backward)
        nn.utils.clip_grad_norm_(self.params, CLIP)
        if self.message.numel():
            dist.all_reduce(self.message)
        self.master.grad = self._own_gradients()
        self.optimizer.step()
        self.flat[self.begin : self.end] = self.master.detach()
        self.model.zero_grad(set_to_none=True)

    def _own_gradients(self) -> Tensor:  # (S,) fp32
        own, start = torch.empty_like(self.master), 0
        for p in self.params:
            a, b = max(start, self.begin), min(start + p.numel(), self.end)
            if a < b and p.grad is not None:
                own[a - self.begin : b - self.begin] = p.grad.reshape(-1)[a - start : b - start]
            start += p.numel()
        return own

    def finish(self) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return {}


class DataParallel:
    """torch's DistributedDataParallel with AdamW."""

    def __init__(self, model: nn.Module, hook: str, lr: float) -> None:
        # PowerSGD on gloo needs all gradients in one bucket
        options = {"bucket_cap_mb": 1000} if hook == "powersgd" else {}
        self.model = nn.parallel.DistributedDataParallel(model, **options)
        register_hook(self.model, hook)
        shipped = {"betas": (0.9, 0.95), "weight_decay": 0.1}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True, **shipped)

    def step(self, tokens: Tensor) -> None:
        self.forward_ms, self.compute_ms = timed(lambda: next_token_loss(self.model, tokens), Tensor.backward)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def finish(self) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return {}


def register_hook(model: nn.parallel.DistributedDataParallel, hook: str) -> None:
    """Give DDP one of torch's communication hooks; the empty name leaves it alone."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook == "bf16":

        def compress(state: Any, bucket: Any) -> Any:  # DDP refuses torch's own by name on a CPU
            return default_hooks.bf16_compress_hook(state, bucket)

        compress.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
        model.register_comm_hook(None, compress)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class Engine:
    """A DeepSpeed engine with a shipped configuration."""

    def __init__(self, model: nn.Module, method: Method, micro_batch: int, lr: float, dense_first: bool) -> None:
        import deepspeed

        import deepspeed_scape  # noqa: F401 (registers SCAPE and AdamS)

        config = json.loads((CONFIGS / f"{method.config}.json").read_text())
        config["train_micro_batch_size_per_gpu"] = micro_batch
        config["zero_optimization"] |= method.zero
        config |= method.top
        config["optimizer"]["params"]["lr"] = lr
        if not method.is_scape:
            config["optimizer"]["params"]["fused"] = True
        elif not dense_first:
            config["optimizer"]["params"]["warmup_steps"] = 0
        self.engine = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config, dist_init_required=False
        )[0]
        self.model, self.optimizer = self.engine, self.engine.optimizer

    def step(self, tokens: Tensor) -> None:
        self.forward_ms, self.compute_ms = timed(lambda: next_token_loss(self.engine, tokens), self.engine.backward)
        self.engine.step()

    def finish(self) -> None:
        getattr(self.engine.optimizer, "finish_mask", lambda: None)()

    def stats(self) -> dict[str, float]:
        return dict(getattr(self.engine.optimizer, "step_stats", {}))


def build(
    method: Method,
    model: Callable[[], nn.Module],
    *,
    rank: int,
    world: int,
    micro_batch: int,
    mock_bytes: int = 0,
    lr: float = LR,
    dense_first: bool = False,
) -> Trainable:
    """This rank's part of a method; every rank has to build the same ones in the same order.

    Args:
        model: makes the freshly initialised model, the same on every rank.
        mock_bytes: what a mock's rank sends in a step.
        dense_first: SCAPE's dense steps first, as the configuration has them; for timing there are none.
    """
    if method.kind in ("local", "mock"):
        return LocalStep(model(), rank, world, mock_bytes if method.kind == "mock" else 0)
    if method.kind == "ddp":
        return DataParallel(model(), method.hook, lr)
    return Engine(model(), method, micro_batch, lr, dense_first)
