"""Where a figure comes from: commit, date, hardware, versions."""

from __future__ import annotations

import datetime
import os
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def provenance() -> dict[str, str]:
    """Commit (with ``+`` when the tree has changes), date, processor and package versions."""
    return {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "hardware": f"{os.cpu_count()} x {_processor()}",
        **{name: installed(name) for name in ("torch", "deepspeed")},
    }


def installed(name: str) -> str:
    """The version of a package, ``absent`` without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def commit() -> str:
    """Short hash of HEAD, ``unknown`` outside a repository."""
    folder = Path(__file__).parent
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
    if head.returncode:
        return "unknown"
    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=folder, capture_output=True, text=True)
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown processor"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown processor")
