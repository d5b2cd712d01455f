"""Ranks of test_saving.py: killed at a chosen point of a save, loading what they are told, filling a disk."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

from tests import worker

CASE = {"stage": 2, "dtype": "fp32"}
POINTS = ("half a file", "all files", "sealed", "between the renames", "renamed", "half of latest")


def build(seed: int = 0, **changes: Any) -> Any:
    from tests.dist import odd_model

    return odd_model.build({**CASE, "params": {"sparsity": 0.9}, **changes}, seed)


def train(engine: Any, first: int, stop: int) -> list[float]:
    from tests.dist import odd_model

    return [odd_model.train_step(engine, step) for step in range(first, stop)]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str, rank: int) -> None:
    """Have this process killed when its next save reaches ``point``."""
    from deepspeed_scape import manifest, saving

    if point == "half a file" and rank == 1:
        write = torch.save

        def write_half(state: Any, path: str, **kwargs: Any) -> None:
            write(state, path, **kwargs)
            os.truncate(path, os.path.getsize(path) // 2)
            die()

        torch.save = write_half
    elif point == "all files" and rank == 0:
        saving._seal = lambda *args: die()
    elif point == "sealed" and rank == 0:
        manifest.publish = lambda folder: die()
    elif point == "between the renames" and rank == 0:
        rename = Path.rename
        Path.rename = lambda self, to: die() if self.name.endswith(".saving") else rename(self, to)
    elif point == "renamed" and rank == 0:
        rest = manifest.publish
        manifest.publish = lambda folder: (rest(folder), die())
    elif point == "half of latest" and rank == 0:
        replace = Path.replace
        Path.replace = lambda self, to: die() if "latest" in self.name else replace(self, to)


def run_die(folder: Path, rank: int, point: str) -> None:
    """Save tag "one", go on, and be killed while saving "two", or "one" again where the point needs an older one."""
    engine = build()
    train(engine, 0, 4)
    engine.save_checkpoint(str(folder), tag="one")
    train(engine, 4, 6)
    arm(point, rank)
    engine.save_checkpoint(str(folder), tag="one" if point == "between the renames" else "two")


def attempt(engine: Any, folder: str, tag: str | None, **options: Any) -> dict[str, Any]:
    from tests.dist.rank_checkpoint import digest

    train(engine, 500, 501)
    before = digest(engine), engine.global_steps, engine.module.calls.tolist()
    try:
        path, _ = engine.load_checkpoint(folder, tag=tag, **options)
        return {"loaded": path, "steps": engine.optimizer.applied_steps, "losses": train(engine, 4, 6)}
    except RuntimeError as error:
        after = digest(engine), engine.global_steps, engine.module.calls.tolist()
        return {"error": f"{type(error).__name__}: {error}", "unchanged": after == before}


def run_try(attempts: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    engine = build(seed=5)
    results = []
    for one in attempts:
        tag = one["tag"]
        results.append(attempt(engine, one["folder"], tag[rank] if isinstance(tag, list) else tag))
    engine.destroy()
    return results


def run_good(folder: Path, rank: int) -> dict[str, Any]:
    """The checkpoint to damage, the losses of the run that goes on, and what of ours a safe loader takes."""
    engine = build()
    train(engine, 0, 4)
    engine.save_checkpoint(str(folder), tag="one")
    state = engine.optimizer.state_dict()["scape"]
    torch.save(state, folder / f"ours{rank}.bin")
    ours = torch.load(folder / f"ours{rank}.bin", weights_only=True)
    losses = train(engine, 4, 6)
    engine.save_checkpoint(str(folder), tag="one")  # over the older one
    engine.save_checkpoint(str(folder))
    try:
        engine.save_checkpoint(str(folder), tag=f"mine{rank}")
        tags = "saved"
    except RuntimeError as error:
        tags = str(error)
    step = engine.optimizer.applied_steps
    engine.destroy()
    bf16 = build(dtype="bf16")
    other = attempt(bf16, str(folder), "one")
    bf16.destroy()
    return {"losses": losses, "safe": sorted(ours) == sorted(state), "step": step, "tags": tags, "bf16": other}


def run_full(folder: Path, small: Path, rank: int) -> dict[str, Any]:
    """A save that runs out of disk on the rank that also writes the model; training goes on, and so do later saves."""
    engine = build()
    train(engine, 0, 4)
    engine.save_checkpoint(str(small), tag="one")
    if rank == 0:
        (small / "filler").write_bytes(b"x" * (os.statvfs(small).f_bavail * os.statvfs(small).f_frsize - 20_000))
    torch.distributed.barrier()
    train(engine, 4, 5)
    try:
        engine.save_checkpoint(str(small), tag="two")
        said = "saved"
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    left = sorted(name for name in os.listdir(small) if not name.endswith(".py"))  # DeepSpeed's recovery scripts
    losses = train(engine, 5, 6)
    engine.save_checkpoint(str(folder), tag="elsewhere")
    resumed = attempt(engine, str(small), None)
    engine.destroy()
    return {"said": said, "left": left, "latest": (small / "latest").read_text(), "losses": losses, "resumed": resumed}


def main() -> None:
    verb, folder, *rest = worker.args()
    rank, _ = worker.init(timeout=20)
    if verb == "die":
        run_die(Path(folder), rank, rest[0])
    elif verb == "try":
        worker.report(run_try(json.loads(rest[0]), rank))
    elif verb == "good":
        worker.report(run_good(Path(folder), rank))
    elif verb == "full":
        worker.report(run_full(Path(folder), Path(rest[0]), rank))


if __name__ == "__main__":
    main()
