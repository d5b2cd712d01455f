"""Ranks of test_fuzz.py: each configuration trains three steps, or is refused; what happened, one line each."""

from __future__ import annotations

import copy
import gc
import math
import time
from typing import Any

import torch
import torch.distributed as dist

from tests import worker
from tests.dist import fuzz_configs


def judge(number: int, rank: int) -> dict[str, Any]:
    """What became of configuration ``number`` on this rank."""
    from deepspeed_scape import ScapeConfigError
    from tests.dist import tiny

    settings = fuzz_configs.build(number)
    begin = time.monotonic()
    engine = None
    try:
        engine = tiny.start(copy.deepcopy(settings))
        result = train(engine, rank)
    except ScapeConfigError as error:
        result = {"refused": str(error)}
    except Exception as error:
        result = {"broken": f"{type(error).__module__}.{type(error).__name__}: {error}"[:600], "where": _where(error)}
    result["seconds"] = time.monotonic() - begin
    if engine is not None:
        engine.destroy()
    del engine
    return result


def _where(error: BaseException) -> list[str]:
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}")
        trace = trace.tb_next
    return frames[-4:]


def train(engine: Any, rank: int) -> dict[str, Any]:
    from tests.dist import tiny

    losses = []
    size = engine.train_micro_batch_size_per_gpu()
    for step in range(3):
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(tiny.batch(step, rank, micro, size))
            engine.backward(loss)
            engine.step()
        losses.append(float(loss))
    weight = engine.module.up.weight.data
    replicas = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(replicas, weight)
    return {
        "trained": type(engine.optimizer).__name__,
        "finite": all(map(math.isfinite, losses))
        and all(bool(torch.isfinite(p).all()) for p in engine.module.parameters()),
        "equal": all(torch.equal(r, replicas[0]) for r in replicas),
        "steps": engine.global_steps,
        "applied": getattr(engine.optimizer, "applied_steps", None),
        "skipped": engine.skipped_steps,
    }


def main() -> None:
    first, count = map(int, worker.args())
    rank, _ = worker.init(timeout=120)
    results = []
    for number in range(first, first + count):
        results.append(judge(number, rank))
        if number % 50 == 0:
            gc.collect()
        worker.report(results)
    worker.report(results)


if __name__ == "__main__":
    main()
