"""Run a script on several ranks from a test, and get back what each rank reported.

    results = run_ranks(Path(__file__).with_name("rank_step.py"), world_size=2, args=["--stage", "2"])

The script speaks through `tests.worker`. No rank outlives the call: a timeout, a KeyboardInterrupt and a failed
rank all end with every process of the launch killed, whatever session the launcher put it in. Even a test
process that is itself killed takes its ranks along (they ask the kernel for it).

A start costs seconds, so put many checks into one launch. `launcher`:

    direct      imports torch and DeepSpeed once and forks the ranks (tests/spawn.py): the quickest, the default
    deepspeed   the real `deepspeed` command
    torchrun    the real `torchrun` command
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from launch.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
SPAWN = [sys.executable, "-m", "tests.spawn"]  # as a module: in its own folder launch.py would hide the package launch
BIN = Path(sys.executable).parent
TAIL = 6_000  # characters of each rank's output in an error message
PORT_TRIES = 3

Launcher = Literal["direct", "deepspeed", "torchrun"]


class RanksFailed(AssertionError):
    """A launch that failed: its status (None: it ran into the timeout), output and whatever was reported."""

    def __init__(self, why: str, returncode: int | None, output: str, results: list[Any]):
        super().__init__(f"{why}\n{output[-4 * TAIL :]}")
        self.returncode = returncode
        self.output = output
        self.results = results  # None for a rank that reported nothing


def run_ranks(
    script: str | Path,
    world_size: int,
    args: Sequence[object] = (),
    env: dict[str, str] | None = None,
    timeout: float = 300,
    netns: bool = False,
    launcher: Launcher = "direct",
    module: bool = False,
    preload: bool = True,
    expect_failure: bool = False,
) -> Any:
    """Run `script` on `world_size` ranks; returns the list of what they reported, by rank.

    module          `script` is a module name
    netns           the ranks are alone in a network namespace (skips where the system grants none)
    preload         False: the direct launcher imports nothing before it forks, for scripts that need
                    no torch or that test what an import does
    expect_failure  the launch must fail, and its `RanksFailed` is returned instead of raised
    """
    if netns and not netns_works():
        pytest.skip("no network namespaces here")
    for attempt in range(PORT_TRIES):
        try:
            results = _launch(script, world_size, args, env, timeout, netns, launcher, module, preload)
        except RanksFailed as failure:
            # somebody took the port between our look and the rank's bind
            if "EADDRINUSE" in failure.output and attempt + 1 < PORT_TRIES:
                continue
            if expect_failure:
                return failure
            raise
        if expect_failure:
            raise AssertionError(f"{script} was to fail, but reported {results}")
        return results


def _launch(script, world_size, args, env, timeout, netns, launcher, module, preload):
    with tempfile.TemporaryDirectory(prefix="scape-ranks-") as folder:
        out = Path(folder) / "rank"
        tag = uuid.uuid4().hex
        port = str(free_port())
        command = _command(launcher, str(script), world_size, [str(a) for a in args], module, preload, netns, port)
        with open(Path(folder) / "launcher.log", "wb") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_environment(out, tag, timeout, port, env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                returncode = process.wait(timeout)
            except subprocess.TimeoutExpired:
                returncode = None
            finally:
                kill_tagged(tag)
                process.wait()
        results, output = _results(out, world_size), _output(Path(folder), world_size)
    if returncode is None:
        raise RanksFailed(f"{script} timed out after {timeout} s", None, output, results)
    if returncode != 0:
        raise RanksFailed(f"{script} failed with exit status {returncode}", returncode, output, results)
    # the `deepspeed` command exits 0 when its ranks die of a signal, so the status alone proves little
    if missing := [rank for rank, result in enumerate(results) if result is None]:
        raise RanksFailed(f"{script}: no report from ranks {missing}", returncode, output, results)
    return results


def _command(launcher, script, world_size, args, module, preload, netns, port) -> list[str]:
    spawn = [*SPAWN, "--netns"] if netns else SPAWN
    as_module = ["--module"] if module else []
    script = script if module else str(Path(script).resolve())
    if launcher == "direct":
        bare = [] if preload else ["--bare"]
        return [*spawn, "ranks", str(world_size), *bare, *as_module, script, *args]
    if launcher == "deepspeed":
        options = ["--num_gpus", str(world_size), "--master_addr", "127.0.0.1", "--master_port", port, *as_module]
        return [*spawn, "exec", sys.executable, str(BIN / "deepspeed"), *options, script, *args]
    if launcher == "torchrun":
        options = ["--nproc-per-node", str(world_size), "--master-addr", "127.0.0.1", "--master-port", port]
        return [*spawn, "exec", sys.executable, str(BIN / "torchrun"), *options, *as_module, script, *args]
    raise ValueError(f"launcher {launcher!r}: one of 'direct', 'deepspeed', 'torchrun'")


def _environment(out: Path, tag: str, timeout: float, port: str, extra: dict[str, str] | None) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {
        **inherited,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # the host's name may resolve to an interface that a namespace lacks
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCH_EXTENSIONS_DIR": extensions_dir(),
        "WANDB_MODE": "offline",
        "SCAPE_TEST_OUT": str(out),
        "SCAPE_TEST_TAG": tag,
        "SCAPE_TEST_DEADLINE": str(time.time() + 0.9 * timeout),
        **(extra or {}),
    }


def _results(out: Path, world_size: int) -> list[Any]:
    paths = [Path(f"{out}.{rank}.json") for rank in range(world_size)]
    return [json.loads(p.read_text()) if p.exists() else None for p in paths]


def _output(folder: Path, world_size: int) -> str:
    """The tail of every log, the launcher's last: what it says is mostly that a rank failed."""
    parts = []
    for name in [f"rank.{rank}.log" for rank in range(world_size)] + ["launcher.log"]:
        with contextlib.suppress(FileNotFoundError):
            text = (folder / name).read_text(errors="replace")
            parts.append(f"--- {name}\n{text[-TAIL:]}")
    return "\n".join(parts)


def kill_tagged(tag: str, patience: float = 10.0) -> None:
    """Kill every process that has this tag in its environment, and return when they are gone.

    A process group would not do: torchrun gives each rank a session of its own.
    """
    deadline = time.monotonic() + patience
    seen: set[int] = set()
    while (pids := _tagged(tag)) or any(is_alive(pid) for pid in seen):
        # a dying process loses its environment before its sockets: remember it until it is dead
        seen.update(pids)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise AssertionError(f"processes {sorted(seen)} do not die")
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _tagged(tag: str) -> list[int]:
    needle = f"SCAPE_TEST_TAG={tag}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours; a zombie's reads empty
            if needle in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@functools.cache
def extensions_dir() -> str:
    """One folder for this test session: a killed extension build leaves a lock that hangs all later starts."""
    folder = tempfile.mkdtemp(prefix="scape-torch-extensions-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def netns_works() -> bool:
    return subprocess.run([*SPAWN, "--netns", "exec", "true"], cwd=ROOT, capture_output=True).returncode == 0
