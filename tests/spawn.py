"""Start ranks: the program behind `tests.launch.run_ranks`, never imported by a test.

    python -m tests.spawn [--netns] exec COMMAND...      become COMMAND
    python -m tests.spawn [--netns] ranks N [--bare] [--module] SCRIPT ARGS...
                                                         import what every rank imports once, fork N ranks

Forking after the imports (--bare: there are none) is what makes the second form quick: they are nearly all of a
start. A fork is safe at that point, since nothing has started a thread yet (checked), and the scripts see no
difference.
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import signal
import struct
import sys
import time
from pathlib import Path

from launch.lifeline import die_with_parent

CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
IFF_UP = 1
GRACE = 3.0  # seconds the other ranks have to report their own error once one has failed


def enter_netns() -> None:
    """Move into a new network namespace that has nothing but a loopback interface, and bring that up."""
    import fcntl
    import socket

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        sys.exit(f"spawn: no network namespace: {os.strerror(ctypes.get_errno())}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


def run_rank(rank: int, world_size: int, script: str, module: bool, args: list[str]) -> None:
    """In the forked child: run `script` as `__main__`, its output in a file of its own."""
    import random

    die_with_parent()
    log = os.open(f"{os.environ['SCAPE_TEST_OUT']}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )  # fmt: skip
    random.seed()  # a fork inherits the state, fresh interpreters differ
    sys.argv = [script, *args]
    if module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")


def wait_ranks(pids: set[int]) -> int:
    """Reap the ranks; once one fails, give the others `GRACE` seconds. Returns the first bad exit status."""
    status, deadline = 0, float("inf")
    while pids:
        pid, code = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if time.monotonic() > deadline:
                for other in pids:
                    os.kill(other, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.02)
            continue
        pids.discard(pid)
        code = os.waitstatus_to_exitcode(code)
        if code != 0 and status == 0:
            status, deadline = (code if code > 0 else 128 - code), time.monotonic() + GRACE
    return status


def import_early() -> None:
    """Import what every rank would import by itself: torch, DeepSpeed, and what `deepspeed.initialize` pulls in."""
    import contextlib
    import importlib

    os.environ["TORCH_WARM_POOL"] = "0"  # torch 2.6 starts its pool of compilers, and a thread for it, when imported
    import deepspeed
    import torch._dynamo  # by any optimizer's constructor, 2 s
    import torch._inductor.compile_fx  # noqa: F401 (by DeepSpeed's Muon, 2 s, whatever the optimizer)

    with contextlib.suppress(ImportError):  # not in every supported DeepSpeed
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    deepspeed.ops.__compatible_ops__  # noqa: B018 (probed on first access, with a compiler)

    if threads := len(os.listdir("/proc/self/task")) - 1:
        sys.exit(f"spawn: {threads} threads after the imports, so a fork is unsafe")


def fork_ranks(world_size: int, script: str, module: bool, args: list[str]) -> int:
    gc.freeze()  # else each rank's collector visits all that was imported, copying its pages: 2 s at exit alone
    pids = set()
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            run_rank(rank, world_size, script, module, args)
            sys.exit(0)
        pids.add(pid)
    return wait_ranks(pids)


def main(argv: list[str]) -> int:
    die_with_parent()
    if argv[0] == "--netns":
        enter_netns()
        argv = argv[1:]
    verb, *rest = argv
    if verb == "exec":
        os.execvp(rest[0], rest)
    world_size, *rest = rest
    bare = rest[0] == "--bare"
    rest = rest[bare:]
    module = rest[0] == "--module"
    script, *args = rest[module:]
    if not bare:
        import_early()
    return fork_ranks(int(world_size), script, module, args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
