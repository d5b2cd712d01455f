"""The training loop: one optimizer step, what is measured of it, validation, checkpoints."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_scape.stopwatch import Stopwatch
from launch.batches import BatchOrder, read_windows
from launch.cluster import mean_over_ranks
from launch.metrics import Record
from launch.models import next_token_loss
from launch.tokens import TokenData

WARMUP_STEPS = 10  # left out of the summary's step time


class Meter(Protocol):
    """Counts what this rank sends: deepspeed_scape.wire.WireMeter."""

    bytes_sent: int


@dataclass
class Progress:
    """What a checkpoint keeps beside the weights: it comes back on resume."""

    step: int = 0
    wire_bytes: float = 0.0  # sent by this rank in all steps so far
    best_val_loss: float = math.inf
    wall_s: float = 0.0


@dataclass
class Trainer:
    """One rank's part of a run. `report` gets each record on rank 0, `tick` is called after every step."""

    engine: Any
    data: TokenData
    order: BatchOrder
    eval_batches: list[list[int]]  # windows
    seq: int
    device: torch.device
    meter: Meter
    report: Callable[[Record], None]
    tick: Callable[[], None]
    progress: Progress = field(default_factory=Progress)
    val_loss: float = math.nan
    step_ms: list[float] = field(default_factory=list)  # of this process's steps
    cpu_s: float = 0.0  # processor time of this process's steps, all threads: steadier than the clock on a busy machine
    _diagnosed: float = 0.0  # step of the newest diagnostics that a record has told
    _unlogged: int = 0  # steps since the last record
    _unlogged_bytes: int = 0
    _unlogged_s: float = 0.0

    def __post_init__(self) -> None:
        self.stopwatch = Stopwatch(self.device)

    def batch(self, micro_step: int) -> Tensor:  # (B, seq + 1) int64
        windows = self.order.windows_of(self.progress.step, dist.get_rank(), micro_step)
        return torch.from_numpy(read_windows(self.data.train, windows, self.seq)).to(self.device)

    def train_step(self) -> Tensor:  # () fp32: this rank's mean loss over the micro-steps
        """One optimizer step: every micro-step's forward and backward, and the engine's step."""
        begin, cpu, sent = time.perf_counter(), time.process_time(), self.meter.bytes_sent
        total = torch.zeros((), device=self.device)
        self.stopwatch.restart()
        for micro_step in range(self.order.accumulation):
            tokens = self.batch(micro_step)
            self.stopwatch.lap("data")
            loss = next_token_loss(self.engine, tokens)
            self.stopwatch.lap("forward")
            self.engine.backward(loss)
            self.stopwatch.lap("backward")
            self.engine.step()
            self.stopwatch.lap("engine_step")
            total += loss.detach()
        self.progress.step += 1
        seconds, sent = time.perf_counter() - begin, self.meter.bytes_sent - sent
        self.step_ms.append(seconds * 1e3)
        self.cpu_s += time.process_time() - cpu
        self.progress.wire_bytes += sent
        self.progress.wall_s += seconds
        self._unlogged += 1
        self._unlogged_bytes += sent
        self._unlogged_s += seconds
        return total / self.order.accumulation

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean validation loss in nats a token over the fixed windows of all ranks."""
        self.engine.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for windows in self.eval_batches:
            tokens = torch.from_numpy(read_windows(self.data.val, windows, self.seq)).to(self.device)
            total += next_token_loss(self.engine, tokens)
        self.engine.train()
        (self.val_loss,) = mean_over_ranks([float(total) / len(self.eval_batches)], self.device)
        if self.val_loss < self.progress.best_val_loss:
            self.progress.best_val_loss = self.val_loss
        return self.val_loss

    def tokens_per_step(self) -> int:
        return self.order.world * self.order.micro_batch * self.order.accumulation * self.seq

    def record(self, loss: Tensor, lr: float) -> Record:
        """What is known of the step just done, and of those since the last record. Every rank takes part."""
        own = float(loss)  # waits for the device, so the seconds below are whole
        mine = [own, self._unlogged_bytes / self._unlogged, self.progress.wire_bytes]
        mean_loss, sent, sent_in_all = mean_over_ranks(mine, self.device)
        optimizer = self.engine.optimizer
        grad_norm = self.engine.get_global_grad_norm()
        record = {
            "step": self.progress.step,
            "loss": mean_loss,
            "lr": lr,
            "tokens": self.progress.step * self.tokens_per_step(),
            "tokens_per_s": self._unlogged * self.tokens_per_step() / self._unlogged_s,
            "step_ms": statistics.median(self.step_ms[-self._unlogged :]),
            "bytes_sent": sent,
            "bytes_cumulative": sent_in_all,
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "loss_scale": float(getattr(optimizer, "loss_scale", 1.0)),
            "skipped_steps": self.engine.skipped_steps,
            "epoch": self.order.epoch(self.progress.step - 1),
            "wall_s": self.progress.wall_s,
            "time": time.time(),
        }
        record |= {f"ms_{part}": ms for part, ms in self.stopwatch.read().items()}
        record |= {f"scape/{k}": float(v) for k, v in getattr(optimizer, "step_stats", {}).items()}
        record |= {f"scape/{k}": float(v) for k, v in self._new_diagnostics().items()}
        self._unlogged, self._unlogged_bytes, self._unlogged_s = 0, 0, 0.0
        return record

    def _new_diagnostics(self) -> Record:
        """SCAPE's diagnostics, if there are some that no record has told yet."""
        latest = getattr(getattr(self.engine.optimizer, "diagnostics", None), "latest", {})
        newest = latest.get("diagnosed_step", 0.0)
        if newest == self._diagnosed:
            return {}
        self._diagnosed = newest
        return latest

    def run(
        self, *, steps: int, log_every: int, eval_every: int, save_every: int, save: Callable[[Progress], None]
    ) -> bool:
        """Train up to step `steps`. Returns False if the loss stopped being a number (fp16's skipped steps aside)."""
        while self.progress.step < steps:
            lr = float(self.engine.optimizer.param_groups[0]["lr"])
            loss = self.train_step()
            step, last = self.progress.step, self.progress.step == steps
            validate = last or (eval_every > 0 and step % eval_every == 0)
            if validate or step == 1 or step % log_every == 0:
                record = self.record(loss, lr)
                if validate:
                    record["val_loss"] = self.evaluate()
                self.report(record)
                if not math.isfinite(record["loss"]):
                    return False
            self.tick()
            if save_every > 0 and (last or step % save_every == 0):
                save(self.progress)
        return True

    def summary(self, parameters: int) -> Record:
        """The summary record. Every rank takes part."""
        if math.isnan(self.val_loss):  # resumed at the last step
            self.evaluate()
        timed = self.step_ms[WARMUP_STEPS:] or self.step_ms or [math.nan]
        (sent,) = mean_over_ranks([self.progress.wire_bytes / max(1, self.progress.step)], self.device)
        return {
            "step": self.progress.step,
            "steps": self.progress.step,
            "params": parameters,
            "world_size": self.order.world,
            "final_val_loss": self.val_loss,
            "best_val_loss": self.progress.best_val_loss,
            "step_ms": statistics.median(timed),
            "cpu_ms": self.cpu_s * 1e3 / len(self.step_ms) if self.step_ms else None,
            "bytes_per_step": sent,
            "tokens": self.progress.step * self.tokens_per_step(),
            "skipped_steps": self.engine.skipped_steps,
            "wall_s": self.progress.wall_s,
        }
