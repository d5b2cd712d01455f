"""A few steps of the real engine over NCCL: a world of one, or two processes on one GPU where NCCL allows that.

    python -m evals.gpu_engine
    python -m evals.gpu_engine --ranks 2
    python -m evals.gpu_engine --device cpu      # over gloo: tries this script out, nothing else

Trains a small MLP in bf16 with SCAPE 90%, with and without overlap and with the residual in host memory, checks that
the loss falls, that replicas and masters agree, and that all give the same bits. Ranks take the GPUs in turn. NCCL
refuses two ranks on one GPU ("Duplicate GPU detected"): then this says so and ends well, for there is nothing to learn.
Alone, a rank has no other owner's residual to put into host memory: ``gpu_residual.py`` checks that.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Any

import torch
from torch import nn

from deepspeed_scape import process_groups
from launch.ports import free_port

STEPS = 30


def train(rank: int, **params: Any) -> list[float]:
    """Losses of STEPS steps with a fresh engine; ``params`` are the optimizer's."""
    import deepspeed

    import deepspeed_scape  # noqa: F401 - registers SCAPE

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    config = {
        "train_micro_batch_size_per_gpu": 64,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {
            "type": "SCAPE",
            "params": {"lr": 1e-3, "sparsity": 0.9, "warmup_steps": 0, "check_replicas": 5, **params},
        },
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(64, 256, generator=generator).to(engine.device, torch.bfloat16)
        loss = (engine(x) - x.flip(1)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def run_rank() -> None:
    """One rank, in the environment that :func:`main` has made."""
    import deepspeed

    rank, device = int(os.environ["RANK"]), os.environ["SCAPE_DEVICE"]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:  # its extension would be compiled first
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo", verbose=False)
    try:
        torch.distributed.all_reduce(torch.ones(1, device=device))
        if device == "cuda":
            torch.cuda.synchronize()
    except torch.distributed.DistBackendError as error:
        if "Duplicate GPU" not in str(error):
            raise
        print("NCCL refuses two ranks on one GPU: not run")
        os._exit(0)  # the other ranks hear the same; a broken group cannot be taken down in order
    losses = train(rank)
    for changed in ({"overlap_comm": False}, {"residual_device": "cpu"}):
        others = train(rank, **changed)
        if losses != others:
            sys.exit(f"{changed} changes the results: {losses[-3:]} and {others[-3:]}")
    if not losses[-1] < 0.9 * losses[0]:
        sys.exit(f"the loss does not fall: {losses[0]} to {losses[-1]}")
    print(f"rank {rank}: loss {losses[0]:.4f} to {losses[-1]:.4f} in {STEPS} steps")
    print(f"rank {rank}: neither overlap nor a residual in host memory changes a bit")
    process_groups.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(args.ranks)}
    gpus = max(1, torch.cuda.device_count())
    shared |= {"SCAPE_DEVICE": args.device, "DS_ACCELERATOR": args.device}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", "from evals.gpu_engine import run_rank; run_rank()"],
            env={
                **os.environ,
                **shared,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % gpus),
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            },
        )
        for rank in range(args.ranks)
    ]
    codes = [rank.wait() for rank in ranks]
    sys.exit(max(abs(code) for code in codes))


if __name__ == "__main__":
    main()
