"""The transaction log that an offline W&B run writes (run-ID.wandb), read without an account.

The file is a LevelDB log (github.com/google/leveldb, doc/log_format.md) after a header of 7 bytes: blocks of 32 KiB,
each record with a CRC, a length and a type that tells whether it is whole or a first, middle or last piece. What it
holds are W&B's own protocol buffers, decoded by the installed `wandb`, which has a reader of its own only in its
compiled core.
"""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEADER = 7  # bytes at the start of the file
BLOCK = 32768
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class WandbLog:
    """What a run has logged: its settings, and one dict for each history row."""

    name: str = ""
    group: str = ""
    job_type: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)  # define_metric: name or glob, and its x axis
    finished: bool = False


def read_records(path: Path) -> Iterator[bytes]:
    """The records of a log file; a last one that was cut short by a kill is left out.

    Raises ValueError for a file that is no such log.
    """
    data = path.read_bytes()
    if data[:4] != b":W&B":
        raise ValueError(f"{path}: not a .wandb file")
    at, pieces = HEADER, bytearray()
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:  # the rest of a block is padding
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        start, at = at + HEADER, at + HEADER + length
        if kind not in (FULL, FIRST, MIDDLE, LAST) or at > len(data):
            return
        if kind in (FULL, FIRST):
            pieces.clear()
        pieces += data[start:at]
        if kind in (FULL, LAST):
            yield bytes(pieces)


def read_wandb(path: Path) -> WandbLog:
    """Config, history and summary of an offline run. Raises ValueError without `wandb`, or for another file."""
    if importlib.util.find_spec("wandb") is None:
        raise ValueError(f"{path}: reading a .wandb file needs the package wandb; pip install wandb")
    from wandb.proto import wandb_internal_pb2 as pb

    log = WandbLog()
    for raw in read_records(path):
        record = pb.Record()
        record.ParseFromString(raw)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            log.name, log.group, log.job_type = record.run.display_name, record.run.run_group, record.run.job_type
            log.config |= _items(record.run.config.update)
        elif kind == "config":
            log.config |= _items(record.config.update)
        elif kind == "history":
            row = _items(record.history.item)
            log.history.append(row | {"_step": row.get("_step", record.history.step.num)})
        elif kind == "summary":
            log.summary |= _items(record.summary.update)
        elif kind == "metric":
            log.metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "exit":
            log.finished = True
    return log


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
