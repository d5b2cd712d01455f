"""Train one small model four ways on two CPU processes and compare loss, bytes and time.

    bash launch/quickstart.sh          makes its own environment first
    python launch/quickstart.py        in an environment that has deepspeed_scape[train]

Each row is a real `deepspeed` run of launch/pretrain.py; results go to runs/quickstart/. QUICKSTART_STEPS changes the
length.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(_ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != _ROOT / "launch"]  # run as a script

from rich.console import Console  # noqa: E402
from rich.status import Status  # noqa: E402
from rich.table import Table  # noqa: E402

from launch.children import run_command  # noqa: E402
from launch.metrics import read_metrics  # noqa: E402
from launch.ports import free_port  # noqa: E402

OUTPUT = _ROOT / "runs" / "quickstart"
RANKS = 2
DEFAULT_STEPS = 1500
DENSE_STEPS = 100  # ScapeOptions' default, which is not imported: DeepSpeed would come with it, and seconds of silence
VISITS_FOR_DENSE_QUALITY = 80  # steps x density, measured: see README


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row: a configuration of ds_configs/ and the learning rate that suits it."""

    name: str
    config: str
    lr: float
    density: float = 1.0


METHODS = (
    Method(name="AdamW, dense ZeRO-2", config="zero2_adamw_fp32.json", lr=4e-3),
    Method(name="AdamS, dense ZeRO-2", config="zero2_adams_fp32.json", lr=1e-3),
    Method(name="SCAPE 90%", config="zero2_scape90_fp32.json", lr=1e-3, density=0.1),
    Method(name="SCAPE 99%", config="zero2_scape99_fp32.json", lr=1e-3, density=0.01),
)


def command_of(method: Method, steps: int, output: Path) -> list[str]:
    """The `deepspeed` command line of one row."""
    return [
        str(Path(sys.executable).with_name("deepspeed")),
        *("--num_gpus", str(RANKS), "--master_port", str(free_port())),
        str(_ROOT / "launch" / "pretrain.py"),
        *("--deepspeed_config", str(_ROOT / "ds_configs" / method.config)),
        *("--preset", "tiny", "--data", "embedded", "--micro-batch", "2"),
        *("--steps", str(steps), "--lr", str(method.lr), "--lr-schedule", "cosine"),
        *("--lr-warmup", str(min(100, steps // 10)), "--eval-every", "0", "--eval-batches", "100"),
        *("--log-every", "50", "--resume", "never", "--output", str(output)),
    ]


def progress(metrics: Path, begin: float, steps: int) -> str:
    """How far the run has come that began at `begin`, in seconds since 1970."""
    done = 0
    with suppress(OSError, ValueError):  # not there yet, just moved aside, or its last line half written
        if metrics.stat().st_mtime >= begin:  # else an older run's
            _, logged, _ = read_metrics(metrics)
            done = logged[-1]["step"] if logged else 0
    return f"{f'step {done} of {steps}' if done else 'starting'}, {time.time() - begin:.0f} s"


def run_method(method: Method, steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Train one row and return its summary record; `say` is told from time to time how far it is.

    Raises SystemExit with the end of the log if the run fails.
    """
    output = OUTPUT / Path(method.config).stem
    log, begin = output / "log.txt", time.time()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    command, metrics = command_of(method, steps, output), output / "metrics.jsonl"
    status = run_command(command, env, log, lambda: say(progress(metrics, begin, steps)))
    if status != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        sys.exit(f"{tail}\n\nquickstart: {method.name} ended with status {status}; the whole log is {log}")
    _, logged, summary = read_metrics(metrics)
    if summary is None:
        sys.exit(f"quickstart: {method.name} wrote no summary; see {log}")
    own = {"method": method.name, "config": method.config, "lr": method.lr, "density": method.density}
    return {**own, **summary, "bytes_last_step": logged[-1]["bytes_sent"]}


def ratios(rows: list[dict[str, Any]]) -> list[float]:
    """Bytes of each row's last step over those of the first row's, which is stock ZeRO."""
    return [row["bytes_last_step"] / rows[0]["bytes_last_step"] for row in rows]


HEADER = ("method", "lr", "val loss", "bytes/step", "of dense", "ms/step")


def cells(row: dict[str, Any], ratio: float) -> tuple[str, ...]:
    return (
        row["method"],
        f"{row['lr']:g}",
        f"{row['final_val_loss']:.3f}",
        f"{row['bytes_last_step']:,.0f}",
        f"{ratio:.1%}",
        f"{row['step_ms']:.1f}",
    )


def remark(steps: int) -> str:
    """What a reader must know before comparing the losses."""
    visits = {m.name: max(0, steps - DENSE_STEPS) * m.density for m in METHODS if m.density < 1}
    told = ", ".join(f"{name} {count:.0f}" for name, count in visits.items())
    need = VISITS_FOR_DENSE_QUALITY
    late = [name for name, count in visits.items() if count < need]
    text = f"SCAPE's first {DENSE_STEPS} steps are dense (warmup_steps), and bytes are those of the last step. "
    text += f"Sparse steps send each element about (steps x density): {told} times; dense quality takes about {need}."
    if late:
        longest = max(round(need / m.density) for m in METHODS if m.name in late) + DENSE_STEPS
        text += f" So {' and '.join(late)} must be behind here: QUICKSTART_STEPS={longest} gives it its chance."
    return f"{text} AdamS and SCAPE run at a quarter of AdamW's lr, where to begin with them (docs/tuning.md)."


def write_results(rows: list[dict[str, Any]], steps: int) -> None:
    """The table as JSON and Markdown in runs/quickstart/."""
    shares = ratios(rows)
    full = [row | {"bytes_of_dense": share} for row, share in zip(rows, shares, strict=True)]
    (OUTPUT / "table.json").write_text(json.dumps({"steps": steps, "ranks": RANKS, "rows": full}, indent=1) + "\n")
    lines = [HEADER, ("---",) * len(HEADER), *(cells(r, s) for r, s in zip(rows, shares, strict=True))]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    (OUTPUT / "table.md").write_text(f"{table}\n{remark(steps)}\n")


def show(console: Console, rows: list[dict[str, Any]], steps: int) -> None:
    title = f"{steps} steps, {rows[0]['params']:,} parameters, {RANKS} ranks, King James Bible"
    table = Table(title=title, caption=remark(steps), caption_justify="left")
    for i, name in enumerate(HEADER):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row, share in zip(rows, ratios(rows), strict=True):
        table.add_row(*cells(row, share))
    console.print(table)
    console.print(f"Saved: {OUTPUT / 'table.md'}, {OUTPUT / 'table.json'}", soft_wrap=True)
    console.print("Next: your own script with SCAPE, in five minutes: docs/start.md")


def show_progress(console: Console, status: Status, doing: str, far: str) -> None:
    """In the status of a terminal, in a line of its own elsewhere."""
    if console.is_terminal:
        status.update(f"{doing}: {far}")
    else:
        console.print(f"  {far}")


def steps_from_environment() -> int:
    """QUICKSTART_STEPS, or the default. Raises SystemExit for what is no positive integer."""
    text = os.environ.get("QUICKSTART_STEPS", str(DEFAULT_STEPS))
    if not text.isdecimal() or int(text) < 1:
        sys.exit(f"QUICKSTART_STEPS={text}: must be a positive integer; the default is {DEFAULT_STEPS}")
    return int(text)


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # show each row when it is done
    steps, console = steps_from_environment(), Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the children
    rows = []
    for number, method in enumerate(METHODS, 1):
        begin = time.monotonic()
        doing = f"{number} of {len(METHODS)}: {method.name}, {steps} steps"
        if not console.is_terminal:  # a status shows nowhere else
            console.print(doing)
        with console.status(f"{doing} (log: {OUTPUT / Path(method.config).stem / 'log.txt'})") as status:
            rows.append(run_method(method, steps, partial(show_progress, console, status, doing)))
        console.print(f"{method.name}: val loss {rows[-1]['final_val_loss']:.3f}, {time.monotonic() - begin:.0f} s")
    write_results(rows, steps)
    show(console, rows, steps)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("quickstart: interrupted; its processes are ended")
