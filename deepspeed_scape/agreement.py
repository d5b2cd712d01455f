"""One verdict for all ranks: a problem that one rank finds alone must stop every rank, with the same message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from deepspeed_scape.manifest import ScapeCheckpointError


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """``value`` (plain types) of every rank, in rank order."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def raise_together(problem: str | None, group: dist.ProcessGroup) -> None:
    """Raise on all ranks when one has a problem.

    Raises:
        ScapeCheckpointError: the problem of the first rank that has one; of which rank, unless all have the same.
    """
    everyone = gather(problem, group)
    rank = next((rank for rank, said in enumerate(everyone) if said), None)
    if rank is not None:
        alike = all(said == everyone[rank] for said in everyone)
        raise ScapeCheckpointError(everyone[rank] if alike else f"{everyone[rank]} (found by rank {rank})")


@contextlib.contextmanager
def all_or_none(group: dist.ProcessGroup) -> Iterator[None]:
    """Run a block without collectives on every rank; if it fails on one, all raise."""
    problem = None
    try:
        yield
    except ScapeCheckpointError as error:
        problem = str(error)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    raise_together(problem, group)
