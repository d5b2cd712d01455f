"""Ranks of test_determinism.py: one run for each variant, and hashes of all state at its end."""

from __future__ import annotations

import json
from typing import Any

from tests import worker

STEPS = 25


def run(variant: dict[str, Any], dtype: str) -> dict[str, Any]:
    from tests.dist import odd_model
    from tests.dist.rank_checkpoint import digest

    params = {"sparsity": 0.9, **variant.get("params", {})}
    zero = {"stage": variant.get("stage", 2), **variant.get("zero", {})}
    engine = odd_model.build({"stage": 2, "dtype": dtype, "params": params, "top": {"zero_optimization": zero}})
    losses = [odd_model.train_step(engine, step) for step in range(STEPS)]
    result = {"losses": losses, "digest": digest(engine), "norm": float(engine.optimizer._global_grad_norm)}
    engine.destroy()
    return result


def main() -> None:
    variants = json.loads(worker.args()[0])
    worker.init()
    worker.report({dtype: [run(variant, dtype) for variant in variants] for dtype in ("fp32", "bf16")})


if __name__ == "__main__":
    main()
