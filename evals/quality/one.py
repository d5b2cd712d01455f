"""One run in a process of its own, started by the sweep; told to end (SIGTERM), it saves itself first."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from pathlib import Path

import torch

from evals.files import write
from evals.provenance import provenance
from evals.quality.job import Job
from evals.quality.spec import RESULTS, RunSpec
from evals.quality.sweep import STOPPED
from launch.corpus import from_files
from launch.lifeline import die_with_parent
from launch.tokens import TokenData, open_tokens, prepare_tokens

HELD_OUT = ["pride-and-prejudice", "the-adventures-of-sherlock-holmes"]  # never used to choose anything
VOCAB = 512
PIECES = 8  # validations and checkpoints of a run


def prepare(corpus: list[str], held_out: list[str], cache: Path) -> str:
    """The key of the token files, built if they are not there."""
    return prepare_tokens(from_files(corpus, held_out), VOCAB, cache)


def run(spec: RunSpec, tokens: TokenData, checkpoint: Path, results: Path, minutes: float = math.inf) -> bool:
    """Train, or go on from the checkpoint, and write the result. False: told to stop, or the time is over; saved."""
    deadline = time.monotonic() + minutes * 60
    torch.set_num_threads(1)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    job = Job(spec, tokens)
    if checkpoint.exists():
        job.load(checkpoint)
        print(f"goes on at step {job.step}", flush=True)
    every = max(1, spec.steps // PIECES)
    job.train(
        eval_every=every,
        save_every=every,
        checkpoint=checkpoint,
        stop=lambda: bool(told) or time.monotonic() > deadline,
    )
    if not job.ended:
        job.save(checkpoint)
        return False
    result = job.result() | {"provenance": provenance()}
    write(results / f"{spec.name}.json", json.dumps(result, indent=1, allow_nan=False) + "\n")
    checkpoint.unlink(missing_ok=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("spec", help="the run as JSON")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--minutes", type=float, default=math.inf, help="save and end after so long")
    args = parser.parse_args()
    die_with_parent()
    tokens = open_tokens(args.cache, args.key)
    finished = run(RunSpec.model_validate_json(args.spec), tokens, args.checkpoint, args.results, args.minutes)
    return 0 if finished else STOPPED


if __name__ == "__main__":
    sys.exit(main())
