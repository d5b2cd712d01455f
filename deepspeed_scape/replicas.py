"""A production check that all replicas are bitwise equal and that each master, cast, is its replica."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_scape.exchange import Exchange
from deepspeed_scape.group import ScapeGroup
from deepspeed_scape.residual import chunks

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRIME = 1_000_003


class ReplicaMismatch(RuntimeError):
    """Replicas have come apart. Training must stop: later steps would train different models."""


def checksum(values: Tensor) -> Tensor:
    """Two int64 sums over the bits of ``values``, plain and weighted by position: (2,). Equal bits, equal sums."""
    bits = values.reshape(-1).view(_BITS[values.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=values.device)
    for piece in chunks(bits.numel(), bits.device):
        part = bits[piece].to(torch.int64)
        place = torch.arange(piece.start, piece.stop, device=bits.device) % _PRIME + 1
        sums[0] += part.sum()
        sums[1] += (part * place).sum()
    return sums


def check_replicas(groups: list[ScapeGroup], exchange: Exchange) -> None:
    """Compare every parameter's replica over the ranks, and every master with the owner's replica.

    Sends 24 bytes a parameter and rank. All ranks raise together.

    Raises:
        ReplicaMismatch: names the parameter and the rank that differs from the majority.
    """
    names = [slot.name for group in groups for slot in group.layout.slots]
    rows = [_group_rows(group) for group in groups]
    own = torch.cat(rows) if rows else torch.empty(0, 3, dtype=torch.int64)
    everyone = [torch.empty_like(own) for _ in range(exchange.world_size)]
    if exchange.world_size > 1:
        dist.all_gather(everyone, own, group=exchange.group)
    else:
        everyone = [own]
    problems = _find_problems(torch.stack(everyone).cpu(), names)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ReplicaMismatch(f"{problems[0]}{more}. Resume from the last checkpoint; if it happens again, report it.")


def _group_rows(group: ScapeGroup) -> Tensor:
    """(slots, 3) int64: two checksums, and how many elements of the owned part differ from the master."""
    size = group.layout.partition_size
    start = group.rank * size
    replica = group.flat[start : start + size]
    bits = _BITS[replica.element_size()]
    differs = replica.view(bits) != group.master.detach().to(replica.dtype).view(bits)
    rows = torch.zeros(len(group.layout.slots), 3, dtype=torch.int64, device=group.flat.device)
    for row, slot in zip(rows, group.layout.slots, strict=True):
        row[:2] = checksum(group.flat[slot.start : slot.start + slot.numel])
        first, stop = max(slot.start - start, 0), min(slot.start + slot.numel - start, size)
        if first < stop:
            row[2] = differs[first:stop].sum()
    return rows


def _find_problems(everyone: Tensor, names: list[str]) -> list[str]:
    """Messages for what differs in (W, slots, 3), the same on every rank."""
    problems = []
    for i, name in enumerate(names):
        sums = [tuple(row) for row in everyone[:, i, :2].tolist()]
        majority = max(sums, key=sums.count)
        problems += [
            f"rank {rank} holds another {name} than the others" for rank, s in enumerate(sums) if s != majority
        ]
        for rank, count in enumerate(everyone[:, i, 2].tolist()):
            if count:
                problems.append(f"rank {rank}: {count} elements of {name} differ between master and replica")
    return problems
