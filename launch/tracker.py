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


class WandbRun:
    """One W&B run. A resumed job goes on with the run whose id is in OUTPUT/wandb-id. WANDB_MODE=offline works."""

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
            resume="allow" if run_id else None,
        )
        id_file.write_text(self._run.id + "\n")

    def log(self, record: Record) -> None:
        self._run.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def finish(self, summary: Record) -> None:
        self._run.summary.update(summary)
        self._run.finish(exit_code=1 if summary.get("diverged") else 0)


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
