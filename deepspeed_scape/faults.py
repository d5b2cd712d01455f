"""When the other ranks do not come: how long a rank waits, and what it says then.

torch.distributed waits 30 minutes, and then says that a receive has timed out. Here a collective that fails ends in one
error that tells which ranks are gone or stopped, as far as can be seen from this one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

_PATIENCE = 4.0  # seconds in which ranks that failed too report it
_SLOW = timedelta(minutes=10)  # reading or writing a checkpoint, where ranks have different amounts to do


class ScapeRankLost(RuntimeError):
    """A collective failed: a rank has ended, is stopped, or cannot be reached. Training must be started again."""


@dataclass(frozen=True)
class _Place:
    """Where a rank runs; ``machine`` is the same for ranks that see each other in /proc."""

    machine: str
    pid: int
    started: str

    @staticmethod
    def here() -> _Place:
        namespace = os.readlink("/proc/self/ns/pid") if Path("/proc/self/ns/pid").exists() else ""
        return _Place(f"{socket.gethostname()} {namespace}", os.getpid(), _stat(os.getpid())[1])


class Roster:
    """Who takes part, and what has become of them. All ranks build it together.

    Args:
        group: the data-parallel process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self._places: list[_Place] = [_Place.here()] * dist.get_world_size(group)
        dist.all_gather_object(self._places, _Place.here(), group=group)
        self._key = f"scape/lost/{id(self)}/" if len(self._places) == 1 else f"scape/lost/{self._places[0]}/"

    @contextlib.contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Turn a failed collective of the block into a :class:`ScapeRankLost` that says what is known.

        Args:
            what: what the ranks were doing, for the message.
        """
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ScapeRankLost) or not _is_transport(error):
                raise
            raise ScapeRankLost(
                f"rank {self.rank}: {what} failed, since {self._find_lost()}. Remedy: start the job again from "
                f"its last checkpoint. torch.distributed said: {_first_line(error)}"
            ) from error

    def _find_lost(self) -> str:
        """What is known of the others, looked at for a while: a dying process closes its sockets before it is dead."""
        deadline = time.monotonic() + _PATIENCE
        silent: list[int] | None = [rank for rank in range(len(self._places)) if rank != self.rank]
        while True:
            seen = {rank: state for rank in range(len(self._places)) if (state := self._look(rank))}
            if seen:
                return "; ".join(f"rank {rank} {state}" for rank, state in seen.items())
            silent = self._still_silent(silent)
            if silent == [] or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if silent is None:
            return "the store of the job does not answer: its host has ended or the network is cut"
        if silent:
            names = ", ".join(map(str, silent))
            return f"ranks {names} did not come: ended, out of reach, or waiting elsewhere (did their data end early?)"
        return "the ranks did not come together in time"

    def _look(self, rank: int) -> str | None:
        """What /proc says of a rank on this machine; None if it runs, or runs elsewhere."""
        place = self._places[rank]
        if place.machine != _Place.here().machine:
            return None
        state, started = _stat(place.pid)
        if started != place.started or state in "ZX":
            return f"(pid {place.pid}) has ended"
        return f"(pid {place.pid}) is stopped" if state in "Tt" else None

    def _still_silent(self, silent: list[int] | None) -> list[int] | None:
        """Which of ``silent`` have not said that they failed as well; None once the store cannot be asked."""
        if silent is None:
            return None
        heard: list[list[int]] = []
        # on a cut wire a request to the store may wait for as long as TCP does, whatever its timeout
        asking = threading.Thread(target=self._ask_store, args=(silent, heard), daemon=True)
        asking.start()
        asking.join(_PATIENCE)
        return heard[0] if heard else None

    def _ask_store(self, silent: list[int], heard: list[list[int]]) -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            store = distributed_c10d._get_default_store()
            store.set_timeout(timedelta(seconds=_PATIENCE))
            store.set(f"{self._key}{self.rank}", "failed")
            heard.append([rank for rank in silent if not store.check([f"{self._key}{rank}"])])


def limit_wait(seconds: float, groups: list[dist.ProcessGroup]) -> None:
    """Let collectives of ``groups`` fail after ``seconds``; 0 leaves them as they are."""
    if seconds:
        for group in groups:
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


@contextlib.contextmanager
def patient(seconds: float, group: dist.ProcessGroup) -> Iterator[None]:
    """Wait longer within the block, since ranks have different amounts to read and write; ``seconds`` as above."""
    before = [(one, _timeout_of(one)) for one in (group, distributed_c10d._get_default_group())] if seconds else []
    for one, limit in before:
        if limit is not None:
            distributed_c10d._set_pg_timeout(max(limit, _SLOW), one)
    try:
        yield
    finally:
        for one, limit in before:
            if limit is not None:
                distributed_c10d._set_pg_timeout(limit, one)


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def _is_transport(error: RuntimeError) -> bool:
    return isinstance(error, getattr(dist, "DistError", ())) or "gloo" in str(error) or "NCCL" in str(error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _stat(pid: int) -> tuple[str, str]:
    """State letter and start time of a process of this machine; ("X", "") if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]
