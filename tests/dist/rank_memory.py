"""A rank of test_memory.py: bytes of every tensor that is alive, after the backward and between steps."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from tests import worker

WIDTH, LAYERS = 512, 8  # 2.1 million parameters: what is not of their size is small beside them


def alive() -> int:
    """Bytes of all storages that some tensor uses."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        try:
            if isinstance(thing, torch.Tensor) and thing.device.type != "meta":
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        except (ReferenceError, NotImplementedError, RuntimeError):
            continue
    return sum(found.values())


def held(dtype: str, type: str = "SCAPE", **params: Any) -> dict[str, Any]:
    """Bytes a parameter while gradients wait for the step, and after it."""
    from tests.dist import tiny

    before = alive()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    count = sum(p.numel() for p in model.parameters())
    top = {"zero_optimization": {"stage": 1}}
    if type != "SCAPE":
        params |= {"torch_adam": True}
    engine = tiny.start(tiny.config(1, dtype, type, top=top, **params), model)
    rows = torch.ones(2, WIDTH, dtype=next(engine.module.parameters()).dtype)
    out = {}
    for _ in range(2):  # the first step makes masks and scratch
        loss = engine(rows).float().square().mean()
        engine.backward(loss)
        del loss
        out["waiting"] = (alive() - before) / count
        engine.step()
        out["between"] = (alive() - before) / count
    engine.destroy()
    del engine, model, rows
    return out


def main() -> None:
    worker.init()
    from deepspeed_scape import host_residual

    host_residual.STAGE_ON_CPU = True
    report = {
        "fp32-0.9-fp32-device": held("fp32", sparsity=0.9),
        "bf16-0.99-fp32-device": held("bf16", sparsity=0.99),
        "bf16-0.99-bf16-device": held("bf16", sparsity=0.99, residual_dtype="bf16"),
        "bf16-0.99-fp32-cpu": held("bf16", sparsity=0.99, residual_device="cpu"),
        "bf16-dense": held("bf16", "AdamW"),
    }
    worker.report(report)


if __name__ == "__main__":
    main()
