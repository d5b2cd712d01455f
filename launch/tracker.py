"""Where records go besides metrics.jsonl: Weights & Biases if asked for, and the terminal."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from launch.metrics import Record

WANDB_PIP = "pip install wandb"


def require_wandb() -> None:
    """Raises ValueError with the pip command if `wandb` is not installed."""
    if importlib.util.find_spec("wandb") is None:
        raise ValueError(f"--wandb: needs the package wandb; {WANDB_PIP}")


# what a loss is drawn over: steps by itself, and these three under a prefix of their own, since W&B gives a metric
# one x axis
AXES = {"by_tokens": "tokens", "by_wall_s": "wall_s", "by_bytes": "bytes_cumulative"}
LOSSES = ("loss", "val_loss")
HISTOGRAM = "scape/visits_hist_"


class WandbRun:
    """One W&B run of the experiment `group`. WANDB_MODE=offline works.

    A resumed job goes on with the run whose id is in OUTPUT/wandb-id.
    """

    def __init__(
        self, output: Path, *, project: str, name: str, group: str | None, config: Record, resume: bool
    ) -> None:
        import wandb

        id_file = output / "wandb-id"
        run_id = id_file.read_text().strip() if resume and id_file.exists() else None
        self._run: Any = wandb.init(
            project=project,
            name=name,
            group=group,
            config=config,
            dir=str(output),
            id=run_id,
            job_type=config.get("deepspeed", {}).get("optimizer", {}).get("type"),
            resume="allow" if run_id else None,
        )
        for prefix, axis in AXES.items():
            self._run.define_metric(axis, hidden=True)
            self._run.define_metric(f"{prefix}/*", step_metric=axis)
        self._run.define_metric("val_loss", summary="min")
        id_file.write_text(self._run.id + "\n")

    def log(self, record: Record) -> None:
        self._run.log(with_axes(record), step=record["step"])

    def finish(self, summary: Record) -> None:
        self._run.summary.update(summary)
        self._run.finish(exit_code=1 if summary.get("diverged") else 0)


def with_axes(record: Record) -> Record:
    """What W&B gets of a record: each loss again for each further x axis, and the visits as one histogram."""
    sent = {k: v for k, v in record.items() if k != "step" and v is not None}
    for prefix, axis in AXES.items():
        if axis in sent:
            sent |= {f"{prefix}/{name}": sent[name] for name in LOSSES if name in sent}
    visits = {int(k.removeprefix(HISTOGRAM)): sent.pop(k) for k in list(sent) if k.startswith(HISTOGRAM)}
    if visits:
        import wandb

        lows = sorted(visits)
        edges = [*lows, 2 * lows[-1]]
        sent["scape/visits_histogram"] = wandb.Histogram(np_histogram=([visits[low] for low in lows], edges))
    return sent


def format_seconds(seconds: float) -> str:
    """Hours, minutes and seconds: 3:07 or 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Terminal:
    """A progress bar with the time left on a terminal; elsewhere a plain line for each logged step."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last, self._start = first, last, time.monotonic()
        self._bar = tqdm(total=last, initial=first, unit="step", dynamic_ncols=True) if sys.stderr.isatty() else None

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def show(self, record: Record) -> None:
        parts = [f"loss {record['loss']:.4f}", f"lr {record['lr']:.2e}"]
        parts += [f"val {record['val_loss']:.4f}"] if "val_loss" in record else []
        parts += [f"{record['bytes_sent'] / 1e3:.1f} kB/step", f"{record['step_ms']:.1f} ms"]
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(parts))
            return
        step = record["step"]
        left = (time.monotonic() - self._start) / max(1, step - self._first) * (self._last - step)
        print(f"step {step}/{self._last}  {'  '.join(parts)}  ETA {format_seconds(left)}", flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
