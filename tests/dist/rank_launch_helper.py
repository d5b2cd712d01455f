"""The ranks of test_launch_helper.py: the first argument says what they do."""

import os
import sys
import time

from tests import worker


def all_reduce(args: list[str]) -> None:
    rank, world_size = worker.init()

    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    x = torch.full((3,), float(rank + 1))
    before = worker.loopback_bytes()
    dist.all_reduce(x)
    worker.report(
        {
            "rank": rank,
            "world_size": world_size,
            "sum": x.tolist(),
            "args": args,
            "pid": os.getpid(),
            "netns": os.readlink("/proc/self/ns/net"),
            "bytes": worker.loopback_bytes() - before,
            "fp16": get_accelerator().is_fp16_supported(),
            "extensions": os.environ["TORCH_EXTENSIONS_DIR"],
        }
    )


def end_badly(verb: str) -> None:
    """Report, then: rank 1 hangs, raises, exits or had nothing to report; rank 0 hangs with it where it would wait."""
    worker.guard()
    rank = int(os.environ["RANK"])
    if verb != "mute" or rank == 0:
        worker.report({"rank": rank, "pid": os.getpid()})
    if verb == "hang" or (verb in ("fail", "exit") and rank == 0):
        time.sleep(600)
    if verb == "fail":
        raise RuntimeError("rank 1 gives up")
    if verb == "exit":
        sys.exit(3)


if __name__ == "__main__":
    first, *rest = worker.args()
    if first == "ok":
        all_reduce(rest)
    else:
        end_badly(first)
