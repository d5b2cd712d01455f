"""Ranks of test_backward.py: ways to call backward, to recompute activations, to accumulate and to compile."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import worker

STEPS = 4
Backward = Callable[[Any, Tensor], Any]
WAYS: dict[str, Backward] = {
    "engine": lambda engine, loss: engine.backward(loss),
    "loss": lambda engine, loss: loss.backward(),
    "scale": lambda engine, loss: engine.scale(loss).backward(),
}
DIRECT = hasattr(deepspeed.DeepSpeedEngine, "scale")  # whether this DeepSpeed knows loss.backward() (since 0.18.3)
COMPILED_AUTOGRAD = "compiled_autograd_enabled" in inspect.signature(deepspeed.DeepSpeedEngine.compile).parameters
KNOWN = tuple(WAYS) if DIRECT else ("engine",)
CASES = ["1-fp32-1-loss", "2-fp32-4-loss", "2-fp32-4-rich", "1-fp32-3-rich", "2-bf16-4-rich", "2-fp16-4-rich"]
RECOMPUTES = ("reentrant", "not reentrant", "deepspeed")


class DeepNet(nn.Module):
    """A tied embedding and three layers, the first of them used twice, so that its hooks fire twice in one backward.

    Args:
        recompute: how activations come back in the backward: "no" (they are kept), or one of RECOMPUTES.
        rich: whether the output is a dict of loss and logits, as of a transformers model, or the loss alone.
    """

    def __init__(self, recompute: str = "no", rich: bool = False) -> None:
        from tests.dist.tiny import VOCAB, WIDTH

        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.recompute, self.rich = recompute, rich

    def forward(self, pairs: Tensor) -> Any:
        x = self.embed(pairs[:, 0])
        for layer in (*self.layers, self.layers[0]):
            if self.recompute == "no":
                x = x + layer(x)
            elif self.recompute == "deepspeed":
                x = x + deepspeed.checkpointing.checkpoint(layer, x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
        logits = x @ self.embed.weight.t()
        loss = nn.functional.cross_entropy(logits.float(), pairs[:, 1])
        return {"loss": loss, "logits": logits} if self.rich else loss


def start(model: nn.Module, stage: int = 2, dtype: str = "fp32", micros: int = 1, **top: Any) -> Any:
    from tests.dist import tiny

    settings = tiny.config(stage, dtype, sparsity=0.9, top={"gradient_accumulation_steps": micros, **top})
    return tiny.start(settings, model, list(model.parameters()))


def outcome(engine: Any, losses: list[float]) -> dict[str, Any]:
    """Hashes of the whole state, the masters, and the losses; the engine is done with."""
    from tests.dist.rank_checkpoint import digest

    masters = torch.cat([group.master.data.double() for group in engine.optimizer.scape_groups])
    found = {"digest": digest(engine), "masters": masters.tolist(), "losses": losses}
    engine.destroy()
    return found


def train(engine: Any, rank: int, way: str = "engine") -> dict[str, Any]:
    """STEPS optimizer steps, the engine deciding which micro-step is the last one."""
    from tests.dist import tiny

    losses = []
    for step in range(STEPS):
        for micro in range(engine.gradient_accumulation_steps()):
            output = engine(tiny.batch(step, rank, micro))
            loss = output["loss"] if isinstance(output, dict) else output
            WAYS[way](engine, loss)
            engine.step()
            losses.append(float(loss))
    return outcome(engine, losses)


def ways(rank: int) -> dict[str, Any]:
    """CASES: ZeRO stage, dtype, micro-steps, and whether the model returns its loss alone or logits beside it."""
    out = {}
    for case in CASES:
        stage, dtype, micros, output = case.split("-")
        top = {"fp16": {"enabled": True, "initial_scale_power": 8}} if dtype == "fp16" else {}
        for way in KNOWN:
            if dtype == "fp16" and way == "loss":
                continue
            engine = start(DeepNet(rich=output == "rich"), int(stage), dtype, int(micros), **top)
            out[f"{case}-{way}"] = train(engine, rank, way)
    return out


def unscaled(rank: int) -> dict[str, str]:
    """What loss.backward() says in fp16, and what a step says after gradients that DeepSpeed has not seen."""
    from tests.dist import tiny

    out = {}
    for name, section in (("dynamic", {"initial_scale_power": 8}), ("static", {"loss_scale": 128})):
        engine = start(DeepNet(), dtype="fp16", fp16={"enabled": True, **section})
        out[name] = worker.error_of(lambda engine=engine: engine(tiny.batch(0, rank)).backward())
        out[f"{name} step"] = worker.error_of(engine.step)
        engine.destroy()
    if not DIRECT:
        engine = start(DeepNet())
        engine(tiny.batch(0, rank)).backward()
        out["direct"] = worker.error_of(engine.step)
        engine.destroy()
    engine = start(DeepNet())
    engine.module(tiny.batch(0, rank)).backward()
    out["module"] = worker.error_of(engine.step)
    engine.destroy()
    return out


def twice(rank: int) -> dict[str, float]:
    """A second, direct backward of one forward, after one of either way: what is missing of what both must have left.

    What the first brought for every other parameter is dropped: so it is where only the second reaches it.
    """
    from tests.dist import tiny

    out = {}
    for first in ("engine", "loss") if DIRECT else ():
        engine = start(DeepNet())
        loss = engine(tiny.batch(0, rank))
        engine.backward(loss, retain_graph=True) if first == "engine" else loss.backward(retain_graph=True)
        params = [param for group in engine.optimizer.bit16_groups for param in group]
        once = [param.grad_accum.clone() for param in params]
        for param in params[::2]:
            param.grad_accum = None
        loss.backward()
        left = [torch.zeros_like(p) if p.grad_accum is None else p.grad_accum for p in params]
        want = [g * (1 + i % 2) for i, g in enumerate(once)]
        out[first] = max(float((a - b).abs().max()) for a, b in zip(left, want, strict=True))
        engine.destroy()
    return out


def recomputed(rank: int) -> dict[str, Any]:
    """Every way to recompute, under engine.backward and loss.backward, against activations that are kept."""
    alone = torch.zeros(2, requires_grad=True)
    out: dict[str, Any] = {
        "deepspeed alone": worker.error_of(lambda: deepspeed.checkpointing.checkpoint(nn.Identity(), alone))
    }
    able = RECOMPUTES if out["deepspeed alone"] == "nothing" else RECOMPUTES[:2]
    for dtype, micros in (("fp32", 1), ("bf16", 1), ("fp32", 2)):
        for recompute in ("no", *able):
            for way in ("engine", "loss") if DIRECT else ("engine",):
                engine = start(DeepNet(recompute), 2, dtype, micros)
                out[f"{dtype}-{micros}-{recompute}-{way}"] = train(engine, rank, way)
    return out


def accumulated(rank: int) -> dict[str, Any]:
    """Two micro-steps, accumulated by the engine, by the script, and inside DeepSpeed's context managers."""
    from tests.dist import tiny

    def steps(engine: Any, micro_steps: Callable[[list[Tensor]], Any]) -> dict[str, Any]:
        for step in range(STEPS):
            micro_steps([tiny.batch(step, rank, micro) for micro in range(2)])
        return outcome(engine, [])

    def unmanaged(engine: Any) -> Callable[[list[Tensor]], Any]:
        def both(pairs: list[Tensor]) -> None:
            for part in pairs:
                engine.backward(engine(part))
            engine.step()

        return both

    def boundary(engine: Any) -> Callable[[list[Tensor]], Any]:
        def both(pairs: list[Tensor]) -> None:
            for last, part in enumerate(pairs):
                engine.set_gradient_accumulation_boundary(bool(last))
                engine.backward(engine(part))
            engine.step()

        return both

    def inside(engine: Any, manager: str, all_of_it: bool) -> Callable[[list[Tensor]], Any]:
        def both(pairs: list[Tensor]) -> None:
            with getattr(engine, manager)():
                for part in pairs if all_of_it else pairs[:1]:
                    engine.backward(engine(part) / 2)  # the engine counts one micro-step
            if not all_of_it:
                engine.backward(engine(pairs[1]) / 2)
            engine.step()

        return both

    def as_accelerate(engine: Any) -> Callable[[list[Tensor]], Any]:
        def both(pairs: list[Tensor]) -> None:
            with engine.no_sync():
                engine.set_gradient_accumulation_boundary(False)
                engine.backward(engine(pairs[0]))
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(pairs[1]))
            engine.step()

        return both

    out: dict[str, Any] = {}
    for stage in (1, 2):
        out[f"{stage}-managed"] = train(start(DeepNet(), stage, micros=2), rank)
        engine = start(DeepNet(), stage, micros=2)
        out[f"{stage}-boundary"] = steps(engine, boundary(engine))
        if hasattr(engine, "managed_gradient_accumulation"):
            engine = start(DeepNet(), stage, micros=2, managed_gradient_accumulation=False)
            out[f"{stage}-set boundary"] = worker.error_of(
                lambda engine=engine: engine.set_gradient_accumulation_boundary(True)
            )
            out[f"{stage}-unmanaged"] = steps(engine, unmanaged(engine))
        if hasattr(engine, "coalesce_grad_reduction"):
            engine = start(DeepNet(), stage)
            out[f"{stage}-coalesce"] = steps(engine, inside(engine, "coalesce_grad_reduction", True))
    engine = start(DeepNet(), 1)
    out["1-no_sync"] = steps(engine, inside(engine, "no_sync", False))
    engine = start(DeepNet(), 1, micros=2)
    out["1-no_sync divided"] = steps(engine, as_accelerate(engine))
    engine = start(DeepNet(), 2)
    out["2-no_sync"] = worker.error_of(
        lambda: inside(engine, "no_sync", False)([tiny.batch(0, rank), tiny.batch(0, rank)])
    )
    engine.destroy()
    return out


def compiled(rank: int, backends: Sequence[str] = ("eager",)) -> dict[str, Any]:
    """A model compiled before and after initialize, recomputing or not; with compiled autograd where time permits."""
    out = {"none": train(start(DeepNet()), rank)}
    for backend in backends:
        get_accelerator().set_compile_backend(backend)  # what compiled autograd takes
        torch._dynamo.reset()
        out[f"{backend}-before"] = train(start(torch.compile(DeepNet(), backend=backend)), rank)
        cases: dict[str, tuple[str, str, dict[str, Any]]] = {
            "engine": ("no", "engine", {}),
            "recompute": ("not reentrant", "engine", {}),
        }
        if DIRECT:
            cases["loss.backward"] = ("no", "loss", {})
        if backend != "eager" and COMPILED_AUTOGRAD:
            cases["autograd"] = ("no", "engine", {"compiled_autograd_enabled": True})
        for name, (recompute, way, more) in cases.items():
            torch._dynamo.reset()
            engine = start(DeepNet(recompute))
            engine.compile(backend=backend, **more)
            out[f"{backend}-{name}"] = train(engine, rank, way)
    get_accelerator().set_compile_backend("inductor")  # the default
    return out


def main() -> None:
    rank, _ = worker.init()
    if worker.args():
        worker.report(compiled(rank, worker.args()))
        return
    deepspeed.checkpointing.configure(None)
    dist.barrier()
    report = {check.__name__: check(rank) for check in (ways, unscaled, twice, recomputed, accumulated, compiled)}
    worker.report(report)


if __name__ == "__main__":
    main()
