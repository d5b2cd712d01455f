"""Ranks of test_simulation_equal.py: the distributed optimizer beside the single-process simulation of its ranks."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from deepspeed_scape import buffers
from tests import worker
from tests.simulation import GroupSpec, Simulation


def rank_gradients(model: nn.Module, groups: list[list[nn.Parameter]], step: int, world: int) -> list[Any]:
    """grads[rank][group][param] at the model's present values."""
    from tests.dist.tiny import batch

    everyone = []
    for rank in range(world):
        model.zero_grad(set_to_none=True)
        model(batch(step, rank)).backward()
        everyone.append([[p.grad.clone() for p in group] for group in groups])
    return everyone


def simulate(case: dict[str, Any], world: int) -> dict[str, list[Any]]:
    """Losses (mean over ranks), masks and parameters after every step, from the design alone."""
    from tests.dist.tiny import TinyNet, batch, two_groups

    model = TinyNet()
    params = [group["params"] for group in two_groups(model, 0, 0)]
    options = dict(case["params"])
    lr, decay = options.pop("lr"), options.pop("weight_decay")
    specs = [
        GroupSpec(
            params=[p.detach().clone() for p in group["params"]],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            betas=tuple(options.get("betas", (0.9, 0.95))),
            eps=options.get("eps", 1e-8),
        )
        for group in two_groups(model, lr, decay)
    ]
    for name in ("betas", "eps"):
        options.pop(name, None)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for name in ("value_dtype", "residual_dtype"):
        if name in options:
            options[name] = dtypes[options[name]]
    simulation = Simulation(specs, world, clip_grad=case["clip"], **options)
    out: dict[str, list[Any]] = {"loss": [], "masks": [], "params": [], "norm": []}
    for step in range(case["steps"]):
        with torch.no_grad():
            out["loss"].append(sum(float(model(batch(step, rank))) for rank in range(world)) / world)
        happened = simulation.step(rank_gradients(model, params, step, world))
        with torch.no_grad():
            for g, group in enumerate(params):
                for param, value in zip(group, simulation.parameters(g), strict=True):
                    param.copy_(value)
        out["masks"].append(happened["masks"])
        out["norm"].append(happened["norm"])
        out["params"].append(torch.cat([p.detach().reshape(-1) for group in params for p in group]).clone())
    return out


def distribute(case: dict[str, Any], rank: int) -> dict[str, list[Any]]:
    """The same from a real engine, dense steps in pieces of 700 elements: several groups in one, and one in several."""
    buffers.PIECE = 700
    from tests.dist import tiny

    model = tiny.TinyNet()
    options = dict(case["params"])
    groups = tiny.two_groups(model, options["lr"], options["weight_decay"])
    settings = tiny.config(case["stage"], top={"gradient_clipping": case["clip"]}, **options)
    engine = tiny.start(settings, model, groups)
    optimizer = engine.optimizer
    out: dict[str, list[Any]] = {"loss": [], "masks": [], "params": [], "norm": []}
    for step in range(case["steps"]):
        mean = torch.tensor(tiny.train_step(engine, step, rank))
        torch.distributed.all_reduce(mean)
        out["loss"].append(float(mean) / torch.distributed.get_world_size())
        out["norm"].append(optimizer.step_stats["grad_norm"])
        out["params"].append(tiny.flat_params(engine).clone())
        optimizer.finish_mask()
        used = [None if g.position is None else g.masks().clone() for g in optimizer.scape_groups]
        out["masks"].append(used)  # the mask of the NEXT step
    engine.destroy()
    return out


def train_dense(case: dict[str, Any], rank: int) -> torch.Tensor:
    """The parameters after the same steps of DeepSpeed's own ZeRO with the torch optimizer AdamS."""
    from tests.dist import tiny

    model = tiny.TinyNet()
    options = {name: case["params"][name] for name in ("lr", "weight_decay")}
    settings = tiny.config(case["stage"], type="AdamS", top={"gradient_clipping": case["clip"]}, **options)
    engine = tiny.start(settings, model, tiny.two_groups(model, **options))
    for step in range(case["steps"]):
        tiny.train_step(engine, step, rank)
    params = tiny.flat_params(engine).clone()
    engine.destroy()
    return params


def compare(case: dict[str, Any], real: dict[str, list[Any]], ideal: dict[str, list[Any]]) -> dict[str, Any]:
    """Worst relative parameter and loss differences, and how many mask entries agree."""
    params = max(float((a - b).norm() / b.norm()) for a, b in zip(real["params"], ideal["params"], strict=True))
    worst = max(
        float(((a - b).abs() / (b.abs() + 1e-3)).max()) for a, b in zip(real["params"], ideal["params"], strict=True)
    )
    loss = max(abs(a - b) / abs(b) for a, b in zip(real["loss"], ideal["loss"], strict=True))
    norm = max(abs(a - b) / b for a, b in zip(real["norm"], ideal["norm"], strict=True))
    same = total = 0
    for made, used in zip(real["masks"][:-1], ideal["masks"][1:], strict=True):  # made at t, used at t+1
        for mine, theirs in zip(made, used, strict=True):
            if mine is None:
                continue
            for a, b in zip(mine, theirs, strict=True):
                same += len(set(a.tolist()) & set(b.tolist()))
                total += b.numel()
    moved = float((real["params"][-1] - real["params"][0]).norm() / real["params"][0].norm())
    return {"name": case["name"], "params": params, "worst": worst, "loss": loss, "norm": norm, "moved": moved,
            "mask_overlap": same / total if total else 1.0, "masks": total,
            "first_loss": real["loss"][0], "last_loss": real["loss"][-1]}  # fmt: skip


def main() -> None:
    cases = json.loads(worker.args()[0])
    rank, world = worker.init()
    results = []
    for case in cases:
        real = distribute(case, rank)
        dense = train_dense(case, rank) if case["params"]["sparsity"] == 0 else None
        if rank == 0:
            results.append(compare(case, real, simulate(case, world)))
            if dense is not None:
                results[-1]["dense_params"] = float((real["params"][-1] - dense).norm() / dense.norm())
    worker.report(results)


if __name__ == "__main__":
    main()
