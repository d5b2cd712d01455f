"""Ranks of test_checkpoint.py: ``save`` trains on without stopping and saves midway; ``resume`` goes on from there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from tests import worker

HALF, FULL = 8, 16  # steps before the checkpoint, and in all


def digest(engine: Any) -> dict[str, str]:
    """Hashes of everything that a resume must restore to the bit."""
    engine.optimizer.finish_mask()
    found = {}
    for i, group in enumerate(engine.optimizer.scape_groups):
        masks = torch.zeros(0) if group.position is None else group.position
        parts = {"residual": group.residual.state(), "masks": masks, "last": group.last, "master": group.master.data,
                 "replica": group.flat, "m": group.moments["exp_avg"], "v": group.moments["exp_avg_sq"],
                 "step": group.moments["step"], "decay": group.decay.state()}  # fmt: skip
        for name, tensor in parts.items():
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found[f"{name}{i}"] = hashlib.sha256(raw).hexdigest()[:16]
    return found


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    from tests.dist import tiny

    top: dict[str, Any] = {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    if case["dtype"] == "fp16":
        top["fp16"] = {"enabled": True, "initial_scale_power": 14, "loss_scale_window": 5}
    top["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 12}}
    params = {"sparsity": 0.9, "weight_decay": 0.1, **case.get("params", {})}
    return tiny.config(case["stage"], case["dtype"], top=top, **params)


def build(case: dict[str, Any], seed: int = 0, **params: Any) -> Any:
    from tests.dist import tiny

    model = tiny.TinyNet(seed)
    settings = settings_of({**case, "params": {**case.get("params", {}), **params}})
    return tiny.start(settings, model, tiny.two_groups(model, 3e-3, 0.1))


def is_staged(engine: Any) -> bool:
    """Whether every group's residual lies in host memory, in several buckets."""
    from deepspeed_scape.host_residual import HostResidual

    residuals = [group.residual for group in engine.optimizer.scape_groups]
    return all(isinstance(some, HostResidual) and len(some.buckets) > 1 for some in residuals)


def save(case: dict[str, Any], folder: Path, rank: int) -> dict[str, Any]:
    from tests.dist import tiny

    engine = build(case)
    losses = []
    for step in range(FULL):
        if step == HALF:
            engine.save_checkpoint(str(folder / case["name"]), tag="half")
        losses.append(tiny.train_step(engine, step, rank))
        if step == HALF - 1:
            masters = torch.cat([g.master.data for g in engine.optimizer.scape_groups]).double().sum()
    result = {"losses": losses[HALF:], "digest": digest(engine), "masters": float(masters)}
    result["staged"] = is_staged(engine)
    engine.backward(engine(tiny.batch(99, rank)))  # the first micro-step of two
    engine.step()
    try:
        engine.save_checkpoint(str(folder / "mid"), tag="mid")
        result["mid"] = "saved"
    except RuntimeError as error:
        result["mid"] = f"{type(error).__name__}: {error}"
    engine.destroy()
    return result


def resume(case: dict[str, Any], folder: Path, rank: int) -> dict[str, Any]:
    from tests.dist import tiny

    engine = build(case, seed=1234, **case.get("resume", {}))
    for step in range(3):  # a used optimizer must forget what it was
        tiny.train_step(engine, 1000 + step, rank)
    engine.load_checkpoint(str(folder / case["name"]), tag="half")
    losses = [tiny.train_step(engine, step, rank) for step in range(HALF, FULL)]
    result = {"losses": losses, "digest": digest(engine), "staged": is_staged(engine)}
    engine.destroy()
    return result


def convert(case: dict[str, Any], folder: Path, rank: int) -> dict[str, Any]:
    """Another sparsity goes on with a warning; another normalizer or optimizer does not; weights alone start afresh."""
    from tests.dist import tiny

    path = str(folder / case["name"])
    out: dict[str, Any] = {}
    engine = build(case, seed=5, sparsity=0.99)
    engine.load_checkpoint(path, tag="half")
    out["sparsity"] = [tiny.train_step(engine, step, rank) for step in range(HALF, FULL)]
    out["applied"] = engine.optimizer.applied_steps
    engine.destroy()

    engine = build(case, seed=5, normalizer="adams")
    fresh = digest(engine)
    try:
        engine.load_checkpoint(path, tag="half")
        out["normalizer"] = "loaded"
    except RuntimeError as error:
        out["normalizer"] = str(error)
    out["untouched"] = digest(engine) == fresh  # refused before anything was changed, the replica included
    for step in range(3):
        tiny.train_step(engine, step, rank)
    out["used"] = digest(engine) != fresh
    engine.load_checkpoint(path, tag="half", load_optimizer_states=False)
    reset = digest(engine)
    out["afresh"] = {name for name in reset if reset[name] != fresh[name]}.issubset(
        {"master0", "master1", "replica0", "replica1"}
    )
    out["weights"] = [tiny.train_step(engine, step, rank) for step in range(HALF, FULL)]
    engine.destroy()

    model = tiny.TinyNet()
    adam = tiny.start(tiny.config(case["stage"], case["dtype"], type="AdamW", torch_adam=True), model)
    tiny.train_step(adam, 0, rank)
    adam.save_checkpoint(str(folder / "adam"), tag="one")
    out["reverse"] = worker.error_of(lambda: adam.load_checkpoint(path, tag="half"))
    out["reverse weights"] = adam.load_checkpoint(path, tag="half", load_optimizer_states=False)[0] is not None
    adam.destroy()
    engine = tiny.start(tiny.config(case["stage"], case["dtype"], sparsity=0.9))
    try:
        engine.load_checkpoint(str(folder / "adam"), tag="one")
        out["optimizer"] = "loaded"
    except RuntimeError as error:
        out["optimizer"] = str(error)
    engine.destroy()
    return out


def exported(case: dict[str, Any], folder: Path) -> dict[str, float]:
    """Difference between zero_to_fp32's weights and the masters of all ranks, as float64 sums."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state = get_fp32_state_dict_from_zero_checkpoint(str(folder / case["name"]), tag="half")
    return {"sum": sum(float(value.double().sum()) for value in state.values()), "names": len(state)}


def main() -> None:
    verb, folder, cases = worker.args()
    rank, _ = worker.init()
    from deepspeed_scape import host_residual

    host_residual.STAGE_ON_CPU, host_residual.BUCKET = True, 50
    run = {"save": save, "resume": resume, "convert": convert}[verb]
    result = {case["name"]: run(case, Path(folder), rank) for case in json.loads(cases)}
    if verb == "save":
        torch.distributed.barrier()
        if rank == 0:
            for case in json.loads(cases):
                result[case["name"]]["export"] = exported(case, Path(folder))
    worker.report(result)


if __name__ == "__main__":
    main()
