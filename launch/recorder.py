"""One place that every record of a run goes through: the file, W&B, the terminal."""

from __future__ import annotations

import argparse

import torch.distributed as dist

from launch.metrics import MetricsFile, Record
from launch.tracker import Terminal, WandbRun


class Recorder:
    """Rank 0's records: metrics.jsonl, W&B if asked for, the terminal. Does nothing on other ranks."""

    def __init__(self, args: argparse.Namespace, config: Record, first: int, *, resumed: bool) -> None:
        self.active = dist.get_rank() == 0
        if not self.active:
            return
        self.file = MetricsFile(args.output, resume=resumed)
        self.file.write("config", config | ({"resumed_from": first} if resumed else {}))
        name = args.wandb_name or args.output.name
        self.wandb = (
            WandbRun(
                args.output,
                project=args.wandb_project,
                name=name,
                group=args.wandb_group or args.output.resolve().parent.name,
                config=config,
                resume=resumed,
            )
            if args.wandb
            else None
        )
        self.terminal = Terminal(first, args.steps)

    def report(self, record: Record) -> None:
        if not self.active:
            return
        self.file.write("step", record)
        self.terminal.show(record)
        if self.wandb is not None:
            self.wandb.log(record)

    def tick(self) -> None:
        if self.active:
            self.terminal.advance()

    def finish(self, summary: Record) -> None:
        if not self.active:
            return
        self.file.write("summary", summary)
        self.file.close()
        self.terminal.close()
        if self.wandb is not None:
            self.wandb.finish(summary)
        loss, best = summary["final_val_loss"], summary["best_val_loss"]
        cost = f"{summary['bytes_per_step'] / 1e3:.1f} kB and {summary['step_ms']:.1f} ms a step"
        print(
            f"done: step {summary['steps']}, val loss {loss:.4f} (best {best:.4f}), {cost}; {self.file.path}",
            flush=True,
        )
