"""A long run: what grows, what drifts?

    python -m evals.long_run                       # 20,000 steps on 4 ranks; about 30 minutes on 2 cores
    python -m evals.long_run --steps 500 --ranks 2

A `deepspeed` launch of launch/pretrain.py trains the tiny preset at 99% on the embedded text, compares all replicas and
masters by checksum every 100 steps (a difference ends the run), validates and saves on its way. Meanwhile memory, file
descriptors and threads of every rank are read from the kernel. Writes evals/results/long_run.json; exits with 1 if
something grew or drifted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from evals.files import write
from evals.launched import LaunchedJob
from evals.provenance import provenance
from launch.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
EVERY = 2.0  # seconds between samples
MEMORY = 8 << 20  # bytes a rank may hold more at the end than after its first fifth
DRIFT = 0.05  # nats the validation loss may lie above its best
KEPT = 40  # samples of a rank in the report


@dataclass(frozen=True)
class Sample:
    """What a rank held at a step: resident bytes, open file descriptors, threads."""

    step: int
    rss: int
    fds: int
    threads: int


def watch(job: LaunchedJob) -> list[list[Sample]]:
    """Samples of each rank until the launch ends."""
    job.wait_for(lambda: job.step() > 0, 300)
    ranks = [job.rank_process(rank) for rank in range(job.ranks)]
    samples: list[list[Sample]] = [[] for _ in ranks]
    while job.process.poll() is None:
        step = job.step()
        for process, own in zip(ranks, samples, strict=True):
            with suppress(psutil.Error):  # at its end a rank is no longer there
                own.append(Sample(step, process.memory_info().rss, process.num_fds(), process.num_threads()))
        time.sleep(EVERY)
    return samples


def growth(samples: Sequence[Sample], steps: int) -> dict[str, float]:
    """What the last fifth of the steps holds more than the second fifth, by medians, and the most of each."""
    early = [s for s in samples if 0.2 * steps <= s.step < 0.4 * steps]
    late = [s for s in samples if s.step >= 0.8 * steps]
    if not early or not late:
        raise RuntimeError("too few samples: the run was too short to tell anything; give more --steps")
    out: dict[str, float] = {}
    for name in ("rss", "fds", "threads"):
        before, after = (statistics.median(getattr(s, name) for s in part) for part in (early, late))
        out |= {f"{name}_before": before, f"{name}_grown": after - before}
    return out


def complaints(grown: Sequence[dict[str, float]], values: Sequence[float]) -> list[str]:
    """What is wrong with a run: ``grown`` is of each rank, ``values`` are its validation losses in order."""
    found = []
    for rank, own in enumerate(grown):
        if own["rss_grown"] > MEMORY:
            found.append(f"rank {rank} holds {own['rss_grown'] / 2**20:.1f} MiB more at the end")
        for name in ("fds", "threads"):
            if own[f"{name}_grown"] > 0:
                found.append(f"rank {rank} holds {own[f'{name}_grown']:g} {name} more")
    if values[-1] > min(values) + DRIFT:
        found.append(f"the validation loss ends at {values[-1]:.4f}, its best was {min(values):.4f}")
    return found


def thinned(samples: Sequence[Sample]) -> list[dict[str, int]]:
    """At most KEPT of them, evenly."""
    stride = max(1, -(-len(samples) // KEPT))
    return [asdict(sample) for sample in samples[::stride]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m evals.long_run", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--output", type=Path, default=ROOT / "evals" / "results" / "long_run.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scape-long-") as folder:
        output = Path(folder) / "job"
        job = LaunchedJob(output, args.ranks, [
            "--deepspeed_config", "ds_configs/zero2_scape99_fp32.json", "--data", "embedded",
            "--set", "optimizer.params.check_replicas=100", "--lr-schedule", "cosine", "--lr-warmup", "100",
            "--steps", str(args.steps),
            "--eval-every", str(max(1, args.steps // 20)), "--save-every", str(max(1, args.steps // 8)),
            "--log-every", "10",
        ])  # fmt: skip
        try:
            samples = watch(job)
        finally:
            job.end()
        if job.process.returncode != 0:
            sys.exit(f"evals.long_run: the run failed\n{job.log.read_text(errors='replace')[-3000:]}")
        _, steps, summary = read_metrics(output / "metrics.jsonl")
    values = [record["val_loss"] for record in steps if "val_loss" in record]
    norms = [record["scape/residual_norm"] for record in steps if "scape/residual_norm" in record]
    grown = [growth(own, args.steps) for own in samples]
    found = complaints(grown, values)
    report: dict[str, Any] = {
        **provenance(),
        "command": f"python -m evals.long_run --steps {args.steps} --ranks {args.ranks}",
        "replicas_compared": args.steps // 100,
        "skipped_steps": summary["skipped_steps"] if summary else None,
        "complaints": found,
        "grown": grown,
        "val_loss": values,
        "residual_norm": norms[:: max(1, len(norms) // KEPT)],
        "samples": [thinned(own) for own in samples],
    }
    write(args.output, json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: value for key, value in report.items() if key != "samples"}, indent=1))
    if found:
        sys.exit("evals.long_run: " + "; ".join(found))


if __name__ == "__main__":
    main()
