"""Ranks of test_bytes.py, alone in a network namespace: the counter, the wire meter and the kernel's own counters."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_scape.wire import WireMeter
from tests import worker

STEPS = 12


class WideNet(torch.nn.Module):
    """4 M parameters in two matrices: large messages, so that headers do not matter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(2000, 1000, bias=False)
        self.b = torch.nn.Linear(1000, 2000, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x))).float().square().mean()


def measure(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Bytes of one step: by our counter, by the wire meter, and by the kernel (all ranks together)."""
    from tests.dist import tiny

    engine = tiny.start(tiny.config(2, "bf16", **case), WideNet())
    generator = torch.Generator().manual_seed(rank)

    def step() -> None:
        engine.backward(engine(torch.randn(2, 2000, generator=generator).bfloat16()))
        engine.step()

    step()
    step()
    engine.optimizer.finish_mask()
    dist.barrier()
    time.sleep(0.3)  # let the acknowledgements of what came before arrive
    start = worker.loopback_bytes()
    counted: dict[str, float] = {}
    with WireMeter() as meter:
        for _ in range(STEPS):
            step()
            for name, value in engine.optimizer.step_stats.items():
                if name.startswith("bytes_"):
                    counted[name] = counted.get(name, 0) + value / STEPS
        engine.optimizer.finish_mask()
        sent = meter.bytes_sent / STEPS
    time.sleep(0.3)
    kernel = (worker.loopback_bytes() - start) / STEPS
    dist.barrier()
    numel = sum(p.numel() for p in engine.module.parameters())
    engine.destroy()
    return {"counted": counted, "meter": sent, "kernel": kernel, "numel": numel}


def main() -> None:
    cases = json.loads(worker.args()[0])
    rank, _ = worker.init()
    worker.report([measure(case, rank) for case in cases])


if __name__ == "__main__":
    main()
