"""metrics.jsonl: one JSON object a line, whole lines only.

{"kind": "config", ...}    first, and again after each resume (with "resumed_from": step)
{"kind": "step", ...}      one for every logged step
{"kind": "summary", ...}   last
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

Record = dict[str, Any]

PACKAGES = ("deepspeed-scape", "deepspeed", "torch", "transformers", "tokenizers", "datasets", "numpy")


def _finite(value: Any) -> Any:
    """The value with every NaN and infinity as null, since JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


class MetricsFile:
    """Appends records to OUTPUT/metrics.jsonl, each with one write.

    A fresh run moves an older file aside (metrics-1.jsonl, ...); a resumed one appends, after cutting off the rest of a
    line that a killed run may have left.
    """

    def __init__(self, folder: Path, *, resume: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        if self.path.exists() and resume:
            whole = self.path.read_bytes().rfind(b"\n") + 1
            os.truncate(self.path, whole)
        elif self.path.exists():
            taken = len(list(folder.glob("metrics-*.jsonl")))
            self.path.rename(folder / f"metrics-{taken + 1}.jsonl")
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, kind: str, record: Record) -> None:
        line = json.dumps(_finite({"kind": kind, **record}), allow_nan=False) + "\n"
        os.write(self._fd, line.encode())

    def close(self) -> None:
        os.close(self._fd)


def read_metrics(path: Path) -> tuple[Record, list[Record], Record | None]:
    """The (first config, steps, last summary) of a metrics.jsonl, resumes taken into account.

    Steps that were logged before a kill and done again after the resume are dropped in favour of the later ones, and so
    is a summary that a longer run went on from. Raises ValueError for a file without a config record.
    """
    return join_records([json.loads(line) for line in path.read_text().splitlines()], str(path))


def join_records(records: list[Record], where: str) -> tuple[Record, list[Record], Record | None]:
    """The same from the records themselves; `where` they are from is for the error's message."""
    config: Record | None = None
    steps: list[Record] = []
    summary: Record | None = None
    for record in records:
        if record["kind"] == "step":
            steps.append(record)
        elif record["kind"] == "summary":
            summary = record
        else:
            config = config or record
            steps = [s for s in steps if s["step"] <= record.get("resumed_from", 0)]
            summary = None
    if config is None:
        raise ValueError(f"{where}: no config record; is this a metrics.jsonl of launch/pretrain.py?")
    return config, steps, summary


def _git(root: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_run(root: Path) -> Record:
    """What a config record says of the software: commit, uncommitted changes, versions, machine, start time (UTC)."""
    return {
        "git_commit": _git(root, "rev-parse", "HEAD"),
        "git_dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no")),
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in PACKAGES},
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
