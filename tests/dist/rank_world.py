"""Ranks of test_world_size.py: ``save`` saves midway and trains on; ``resume`` goes on at another world size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import worker

HALF, FULL = 14, 40  # steps before the checkpoint, and in all
POISON = 9  # the step whose gradients are not finite, where the case asks for one


def dump(engine: Any) -> dict[str, Any]:
    """Everything that must survive, element by element and free of the layout; whole tensors on every rank."""
    optimizer = engine.optimizer
    optimizer.finish_mask()
    parameters = {}
    for group in optimizer.scape_groups:
        whole = {"master": group.master.data, "m": group.moments["exp_avg"], "v": group.moments["exp_avg_sq"]}
        whole = {key: _gather(value) for key, value in {**whole, "last": group.last}.items()}
        total = group.residual.state().double()
        dist.all_reduce(total)
        whole["residual"] = total / dist.get_world_size()
        whole["replica"] = group.flat.clone()
        for slot in group.layout.slots:
            place = slice(slot.start, slot.start + slot.numel)
            parameters[slot.name] = {key: value[place].clone() for key, value in whole.items()}
    inner = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.optimizer.param_groups]
    return {
        "parameters": parameters,
        "plain": {
            "step": optimizer.applied_steps,
            "moment_steps": [float(group.moments["step"]) for group in optimizer.scape_groups],
            "decay": [group.decay.state().tolist() for group in optimizer.scape_groups],
            "signal_share": optimizer.norms.signal_share,
            "noise_ratio": _noise_ratio(optimizer),
            "loss_scale": optimizer.loss_scale,
            "hyper": json.loads(json.dumps(inner)),
            "global_steps": engine.global_steps,
            "skipped_steps": engine.skipped_steps,
            "scheduler": engine.lr_scheduler.state_dict(),
        },
        "fixed": engine.module.fixed.weight.detach().clone(),
        "calls": engine.module.calls.clone(),
        "module": {key: value.clone() for key, value in engine.module.state_dict().items()},
    }


def _noise_ratio(optimizer: Any) -> float:
    terms = torch.tensor([float(part) for part in optimizer.norms._noted], dtype=torch.float64)
    dist.all_reduce(terms)
    return float(terms[0] / (terms[1] / dist.get_world_size()))


def _gather(own: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.contiguous())
    return torch.cat(parts)


def train(engine: Any, case: dict[str, Any], first: int, stop: int) -> list[float]:
    from tests.dist import odd_model

    losses = []
    for step in range(first, stop):
        if case.get("poison") and step == POISON:
            with torch.no_grad():  # restored by the skipped step's absence: a bad gradient, not a bad weight
                hook = engine.module.up.weight.register_hook(lambda grad: grad * float("inf"))
            odd_model.train_step(engine, step)
            hook.remove()
            losses.append(float("nan"))
        else:
            losses.append(odd_model.train_step(engine, step))
    return losses


def save(case: dict[str, Any], folder: Path, rank: int) -> dict[str, Any]:
    from tests.dist import odd_model

    engine = odd_model.build(case)
    train(engine, case, 0, HALF)
    engine.save_checkpoint(str(folder / case["name"]), tag="half", client_state={"mine": [1, "two"]})
    saved = dump(engine)
    if rank == 0:
        torch.save(saved, folder / case["name"] / "saved.pt")
    losses = train(engine, case, HALF, FULL)
    skipped = engine.skipped_steps
    engine.destroy()
    return {"losses": losses, "skipped": skipped}


def resume(case: dict[str, Any], folder: Path, rank: int) -> dict[str, Any]:
    from tests.dist import odd_model

    path = folder / case["name"]
    engine = odd_model.build(case, seed=77)
    try:
        engine.load_checkpoint(str(path), tag="half")
        refused = "loaded"
    except RuntimeError as error:
        refused = str(error)
    engine.destroy()
    top = {**case.get("top", {}), "checkpoint": {"load_universal": True}}
    engine = odd_model.build({**case, "top": top}, seed=1234)
    train(engine, {}, 1000, 1003)  # a used optimizer must forget what it was
    _, client = engine.load_checkpoint(str(path))
    loaded = dump(engine)
    if rank == 0:
        torch.save(loaded, path / f"loaded{dist.get_world_size()}.pt")
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, [float(p["replica"].double().sum()) for p in loaded["parameters"].values()])
    losses = train(engine, {}, HALF, FULL)
    engine.save_checkpoint(str(path / f"again{dist.get_world_size()}"), tag="end")
    final = engine.optimizer.applied_steps
    engine.destroy()
    return {"refused": refused, "losses": losses, "client": client.get("mine"), "steps": final,
            "replicas_equal": all(d == digests[0] for d in digests)}  # fmt: skip


def main() -> None:
    verb, folder, cases = worker.args()
    rank, _ = worker.init()
    from deepspeed_scape import host_residual

    host_residual.STAGE_ON_CPU, host_residual.BUCKET = True, 1000
    run = {"save": save, "resume": resume}[verb]
    worker.report({case["name"]: run(case, Path(folder), rank) for case in json.loads(cases)})


if __name__ == "__main__":
    main()
