"""The rank's side of `tests.launch.run_ranks`: join the group, take the arguments, report a result.

A rank's script:

    from tests import worker
    rank, world_size = worker.init()
    ...
    worker.report({"loss": losses})

No DeepSpeed import happens before `init`.
"""

from __future__ import annotations

import atexit
import datetime
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch.lifeline import die_with_parent

COLLECTIVE_TIMEOUT = 60  # seconds until a collective that some rank never entered raises


def guard() -> None:
    """Outlive no launcher, and when hanging tell where, just before the timeout. `init` does this too."""
    die_with_parent()
    deadline = float(os.environ["SCAPE_TEST_DEADLINE"])
    faulthandler.dump_traceback_later(max(0.1, deadline - time.time()), exit=False)


def init(timeout: float = COLLECTIVE_TIMEOUT) -> tuple[int, int]:
    """Initialise DeepSpeed's communication on gloo. Returns (rank, world size)."""
    guard()
    import deepspeed
    import deepspeed.comm as dist
    from deepspeed.accelerator import get_accelerator

    # would be compiled at the first init_distributed, half a minute of C++ for nothing
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # CPUs do compute in fp16; DeepSpeed declines since it is slow there
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo", timeout=datetime.timedelta(seconds=timeout), verbose=False)
    atexit.register(leave)
    return dist.get_rank(), dist.get_world_size()


def leave() -> None:
    """Close the process groups before the interpreter goes."""
    import torch.distributed as dist

    from deepspeed_scape import process_groups

    # after an error the other ranks may wait in a collective, and so would we
    if dist.is_initialized() and not hasattr(sys, "last_type"):
        process_groups.destroy()


def args() -> list[str]:
    """The script's arguments, without the `--local_rank=N` that the `deepspeed` launcher puts first."""
    return [a for a in sys.argv[1:] if not a.startswith("--local_rank=")]


def error_of(action: Callable[[], Any]) -> str:
    """Kind and text of the error that `action` ends in, "nothing" without one."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def report(result: Any) -> None:
    """Hand `result` (anything JSON can hold) to the test, all of it or nothing; the last call counts."""
    path = Path(f"{os.environ['SCAPE_TEST_OUT']}.{os.environ['RANK']}.json")
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(result))
    draft.replace(path)


def loopback_bytes() -> int:
    """Bytes that went over `lo` so far, headers included, all ranks together: a meter where `netns=True`."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise RuntimeError("no loopback interface")
