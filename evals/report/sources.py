"""Runs from what a user has: metrics.jsonl, offline W&B runs, CSV and JSON exports of W&B.

What can't be used is told in a note of its run; a path that holds nothing usable raises ValueError.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from evals.report.runs import Row, Run
from evals.report.wandb_file import read_wandb
from launch.metrics import join_records

RENAMED = {"_step": "step", "Step": "step", "_runtime": "wall_s", "_timestamp": "time"}  # W&B's own keys


def read_runs(paths: list[Path]) -> list[Run]:
    """Every run of every path, with names that tell them apart. Raises ValueError naming the path."""
    runs = [run for path in paths for run in read_path(path)]
    seen: dict[str, int] = {}
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        if seen[run.name] > 1:
            run.name += f" #{seen[run.name]}"
    return runs


def read_path(path: Path) -> list[Run]:
    """The runs of one path: a file, a run's folder, or a folder of runs. Raises ValueError if it has none."""
    if not path.exists():
        raise ValueError(f"{path}: no such run")
    if path.is_file():
        return _read_file(path)
    if (path / "metrics.jsonl").is_file():
        return [read_jsonl(path / "metrics.jsonl", path.resolve().name)]
    logs = sorted(path.glob("*.wandb")) or sorted(path.glob("*/*.wandb"))
    if logs:
        return [_of_wandb(log) for log in logs]
    below = sorted(p.parent for p in path.glob("*/metrics.jsonl"))
    if below:
        return [run for folder in below for run in read_path(folder)]
    raise ValueError(f"{path}: holds no metrics.jsonl, no *.wandb and no folders with one; is it a run's folder?")


def _read_file(path: Path) -> list[Run]:
    kinds = {".wandb": lambda p: [_of_wandb(p)], ".csv": read_csv, ".json": read_json}
    if path.suffix == ".jsonl":
        return [read_jsonl(path, path.resolve().parent.name if path.stem == "metrics" else path.stem)]
    if path.suffix not in kinds:
        raise ValueError(f"{path}: neither .jsonl nor .wandb, .csv or .json")
    return kinds[path.suffix](path)


def read_jsonl(path: Path, name: str) -> Run:
    """A metrics.jsonl; lines that are not whole are left out, with a note. Raises ValueError if nothing is left."""
    records, broken = [], []
    lines = path.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            record["kind"]
        except (ValueError, TypeError, KeyError):
            broken.append(number)
        else:
            records.append(record)
    config, steps, summary = join_records(records, str(path))
    run = Run(name, steps, config, summary or {})
    if broken:
        which = "the last line" if broken == [len(lines)] else f"{len(broken)} lines, the first {broken[0]},"
        run.notes.append(f"{which} of {path.name} could not be read and {'is' if len(broken) == 1 else 'are'} left out")
    if summary is None:
        run.notes.append("has no summary: it is still running or was killed")
    elif summary.get("diverged"):
        run.notes.append("ended because its loss was no longer a number")
    return _noted(run)


def _noted(run: Run) -> Run:
    if not run.rows:
        run.notes.append("has no steps")
    elif not run.values("val_loss"):
        run.notes.append("has no validation loss")
    return run


def _of_wandb(path: Path) -> Run:
    log = read_wandb(path)
    run = Run(log.name or path.stem, [_renamed(row) for row in log.history], log.config, log.summary)
    if not log.finished:
        run.notes.append("has no end: it is still running or was killed")
    return _noted(run)


def _renamed(row: Row) -> Row:
    """W&B's keys as ours, and its histogram of the visits as the shares it was made of."""
    out = {key: value for key, value in row.items() if key not in RENAMED}
    for theirs, ours in RENAMED.items():
        if theirs in row:
            out.setdefault(ours, row[theirs])
    histogram = row.get("scape/visits_histogram")
    parts = histogram if isinstance(histogram, dict) else {k: row.get(f"scape/visits_histogram/{k}") for k in HISTOGRAM}
    if all(isinstance(parts.get(k), list) for k in HISTOGRAM):
        out |= {f"scape/visits_hist_{low:g}": v for low, v in zip(parts["bins"], parts["values"], strict=False)}
    return out


HISTOGRAM = ("bins", "values")


def read_json(path: Path) -> list[Run]:
    """The history of one run as W&B's API gives it: a list of rows. Raises ValueError for anything else."""
    try:
        rows = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
        raise ValueError(f"{path}: expected a list of history rows, as wandb.Api().run(...).history() gives")
    return [_exported(path, path.stem, [_renamed(row) for row in rows])]


def read_csv(path: Path) -> list[Run]:
    """An exported history (one column a key), or an exported panel (columns `RUN - key`, several runs)."""
    with path.open(newline="", errors="replace") as file:
        table = list(csv.DictReader(file))
    if not table:
        raise ValueError(f"{path}: holds no rows")
    rows = [{key: _parsed(value) for key, value in row.items() if key and value not in (None, "")} for row in table]
    if not any(" - " in key for row in rows for key in row):
        return [_exported(path, path.stem, [_renamed(row) for row in rows])]
    found: dict[str, list[Row]] = {}
    for row in rows:
        shared = {key: value for key, value in row.items() if " - " not in key}
        parts: dict[str, Row] = {}
        for column, value in row.items():
            name, dash, key = column.rpartition(" - ")
            if dash and not key.endswith(("__MIN", "__MAX")):
                parts.setdefault(name, {})[key] = value
        for name, part in parts.items():
            found.setdefault(name, []).append(_renamed(shared | part))
    return [_exported(path, name, rows) for name, rows in found.items()]


def _exported(path: Path, name: str, rows: list[Row]) -> Run:
    run = Run(name, rows)
    if not run.rows:
        raise ValueError(f"{path}: no column is a step (looked for step, _step and Step)")
    run.notes.append("is an export: it does not tell its configuration")
    return _noted(run)


def _parsed(value: str) -> Any:
    try:
        return float(value)
    except ValueError:
        return value
