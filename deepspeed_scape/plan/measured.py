"""Compute time, local work and sizes from the metrics.jsonl of a real run of launch/pretrain.py."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

NETWORK_LAPS = frozenset(
    {"reduce", "gather", "mask_wait", "norm"}
)  # the norm's lap holds its all-reduce, mostly waiting
WARMUP_STEPS = 10


def read_run(path: Path, compute_given: bool = False) -> dict[str, Any]:
    """``params``, ``dtype``, ``compute_ms`` and, of sparse steps on CPUs, ``scape_local_ms``: names of PlanOptions.

    A SCAPE run on CPUs tells what its steps spent where: compute is what is left of a step. A run on one rank has no
    network, so its compute is the step without the optimizer's share, which a dense run does not tell: it counts whole.

    Args:
        compute_given: the compute time is known from elsewhere, so any run will do.

    Raises:
        ValueError: not such a file, or a run whose step can't be split into compute and network.
    """
    records = _records(path)
    config = next((r for r in records if r.get("kind") == "config"), None)
    steps = [r for r in records if r.get("kind") == "step" and r.get("step_ms") is not None]
    if config is None or not steps:
        raise ValueError(f"--from-run {path}: no config or no step records; give a metrics.jsonl of launch/pretrain.py")
    timed = [s for s in steps if s["step"] > WARMUP_STEPS] or steps
    found: dict[str, Any] = {"params": config["params"], "dtype": _dtype(config.get("deepspeed", {}))}
    told = [step for step in timed if any(key.startswith("scape/ms_") for key in step)]
    if told:
        found["compute_ms"] = statistics.median(_split(step)[0] for step in told)
        # dense steps, which come first, and skipped ones have other work
        if sparse := [step for step in told if step.get("scape/sparsity") not in (0, 1)]:
            found["scape_local_ms"] = statistics.median(_split(step)[1] for step in sparse)
    elif config.get("world_size") == 1:
        found["compute_ms"] = statistics.median(step["step_ms"] for step in timed)
    elif not compute_given:
        raise ValueError(
            f"--from-run {path}: a run on {config.get('world_size')} ranks without SCAPE's times (dense, or on a "
            "GPU), so compute and network can't be told apart. Give --compute-ms too, or a run on one rank"
        )
    return found


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except OSError as error:
        raise ValueError(f"--from-run {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--from-run {path}: not JSON lines: {error}") from None


def _dtype(config: dict[str, Any]) -> str:
    return next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")), "fp32")


def _split(step: dict[str, Any]) -> tuple[float, float]:
    """(compute, local work) of a step, ms."""
    laps = {key.removeprefix("scape/ms_"): ms for key, ms in step.items() if key.startswith("scape/ms_")}
    local = sum(ms for name, ms in laps.items() if name not in NETWORK_LAPS)
    return max(0.0, step["step_ms"] - sum(laps.values())), local
