"""Ranks of test_faults.py: one of them, the victim, does what real ones do; the others report how they end."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch

from tests import worker

TIMEOUT = 6  # seconds, optimizer.params.timeout
FATAL = ("killed", "stopped", "ended", "data ends early", "raises")


def start() -> Any:
    from tests.dist import odd_model

    return odd_model.build({"stage": 2, "dtype": "fp32", "params": {"sparsity": 0.9, "timeout": TIMEOUT}})


def suffer(kind: str) -> None:
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "ended":
        sys.exit(0)
    elif kind == "data ends early":
        torch.distributed.barrier()  # as at the end of many scripts
    elif kind == "raises":
        raise ValueError("a broken sample")


def run_fatal(kind: str, victim: int, rank: int) -> None:
    """Training that the victim leaves at step 3."""
    from tests.dist import odd_model

    engine = start()
    begin = time.monotonic()
    try:
        for step in range(20):
            begin = time.monotonic()
            if rank == victim and step == 3:
                engine.backward(engine(odd_model.rows(step, 0, rank, torch.distributed.get_world_size())))
                suffer(kind)
            odd_model.train_step(engine, step)
    except Exception as error:
        report = {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - begin}
        worker.report({**report, "began": time.time() - report["seconds"]})
        raise


def run_survivable(rank: int, world: int) -> dict[str, Any]:
    """Bad gradients on the last rank alone, and none at all: which steps were skipped, and are the replicas equal."""
    from tests.dist import odd_model

    engine = start()
    out: dict[str, Any] = {"skipped": [], "equal": []}
    for step, kind in enumerate(["", "nan", "", "inf", "", "no gradient", "", ""]):
        hook = None
        if rank == world - 1 and kind in ("nan", "inf"):
            hook = engine.module.down.weight.register_hook(lambda grad, bad=float(kind): grad * bad)
        for micro in range(2):
            loss = engine(odd_model.rows(step, micro, rank, world))
            if kind == "no gradient" and rank == world - 1:
                loss = torch.zeros((), requires_grad=True) * 1.0
            engine.backward(loss)
            engine.step()
        if hook is not None:
            hook.remove()
        out["skipped"].append(engine.optimizer.step_stats["skipped"])
        replicas = [torch.empty_like(engine.module.up.weight) for _ in range(world)]
        torch.distributed.all_gather(replicas, engine.module.up.weight.data)
        out["equal"].append(all(torch.equal(r, replicas[0]) and bool(torch.isfinite(r).all()) for r in replicas))
    engine.destroy()
    return out


def main() -> None:
    kind, victim = worker.args()
    rank, world = worker.init(timeout=30)
    if kind == "survivable":
        worker.report(run_survivable(rank, world))
    else:
        run_fatal(kind, int(victim), rank)


if __name__ == "__main__":
    main()
