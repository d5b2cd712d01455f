"""Train one run on simulated ranks: the data order, model, loss and schedule of launch/pretrain.py."""

from __future__ import annotations

import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from deepspeed_scape.config import ScapeOptions
from evals.quality.ranks import DenseRanks, ScapeRanks, dense_optimizer
from evals.quality.rules import RULES
from evals.quality.spec import LR_FLOOR, LR_WARMUP, SEQUENCES_OF_EVAL, RunSpec
from launch.batches import BatchOrder, count_windows, eval_windows, read_windows
from launch.models import build_model, count_parameters, next_token_loss
from launch.schedule import lr_factor
from launch.tokens import TokenData

EVAL_BATCH = 16
ONE_BY_ONE = 2  # ranks up to which each has a pass of its own, as in a launch; more would mostly wait for Python


@dataclass
class History:
    """What a run has seen so far."""

    losses: list[float] = field(default_factory=list)  # mean over the ranks, of every step
    curve: list[tuple[int, float]] = field(default_factory=list)  # (step, validation loss)
    seconds: float = 0.0  # of training, validation left out
    sent: float = 0.0  # bytes one rank has sent
    norms: list[tuple[int, float]] = field(default_factory=list)  # (step, residual norm), at validations


class Job:
    """One run. ``train`` goes on from wherever it stands; ``save`` and ``load`` keep it on disk between processes."""

    def __init__(self, spec: RunSpec, data: TokenData, lr_warmup: int = LR_WARMUP) -> None:
        self.spec, self.data, self.lr_warmup = spec, data, lr_warmup
        rules = RULES[spec.rule]
        if rules.prepare is not None:
            rules.prepare()
        self.order = BatchOrder(
            seed=spec.seed,
            windows=count_windows(len(data.train), spec.seq),
            world=spec.world,
            micro_batch=spec.micro_batch,
        )
        held_out = count_windows(len(data.val), spec.seq)
        self.eval_batches = eval_windows(held_out, SEQUENCES_OF_EVAL // EVAL_BATCH, 1, 0, EVAL_BATCH)
        torch.manual_seed(spec.seed)
        self.model = build_model(spec.preset, vocab=data.meta["vocab"], seq=spec.seq)
        self.params: list[nn.Parameter] = list(self.model.parameters())
        settings = spec.settings()
        optimizer, clip = settings["optimizer"], float(settings["gradient_clipping"])
        self.ranks: ScapeRanks | DenseRanks
        if optimizer["type"] == "SCAPE":
            self.ranks = ScapeRanks(self.params, ScapeOptions(**optimizer["params"]), spec.world, clip, rules)
        else:
            built = dense_optimizer(optimizer["type"], self.params, optimizer["params"])
            self.ranks = DenseRanks(self.params, built, spec.world, clip)
        self.step = 0
        self.history = History()

    def gradients(self) -> tuple[list[list[Tensor | None]], float]:
        """Every rank's own gradients on its own batch of this step, and the mean loss."""
        windows = [self.order.windows_of(self.step, rank) for rank in range(self.spec.world)]
        tokens = torch.from_numpy(np.stack([read_windows(self.data.train, own, self.spec.seq) for own in windows]))
        return self.one_by_one(tokens) if self.spec.world <= ONE_BY_ONE else self.at_once(tokens)

    def one_by_one(
        self,
        tokens: Tensor,  # (W, micro_batch, seq + 1) int64
    ) -> tuple[list[list[Tensor | None]], float]:
        """A forward and a backward for each rank, to the bit what the rank of a launch computes."""
        all_gradients, losses = [], []
        for own in tokens:
            loss = next_token_loss(self.model, own)
            loss.backward()
            losses.append(float(loss.detach()))
            all_gradients.append([param.grad for param in self.params])
            for param in self.params:
                param.grad = None
        return all_gradients, sum(losses) / len(losses)

    def at_once(
        self,
        tokens: Tensor,  # (W, micro_batch, seq + 1) int64
    ) -> tuple[list[list[Tensor | None]], float]:
        """The same in one pass over all ranks, equal but for rounding; for 16 ranks a third of the time."""

        def loss_of(params: dict[str, Tensor], own: Tensor) -> Tensor:
            return next_token_loss(lambda **inputs: functional_call(self.model, params, (), inputs), own)

        params = {name: param.detach() for name, param in self.model.named_parameters()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # of attention, which goes rank by rank
            found, losses = vmap(grad_and_value(loss_of), in_dims=(None, 0))(params, tokens)
        return [[found[name][rank] for name in params] for rank in range(self.spec.world)], float(losses.mean())

    def train_step(self) -> float:
        """One optimizer step of all ranks; the mean loss before it."""
        gradients, loss = self.gradients()
        factor = lr_factor(self.step, kind="cosine", warmup=self.lr_warmup, steps=self.spec.steps, floor=LR_FLOOR)
        self.ranks.step(gradients, self.spec.lr * factor)
        self.step += 1
        return loss

    @property
    def diverged(self) -> bool:
        """Whether the loss has stopped being a number."""
        return bool(self.history.losses) and not math.isfinite(self.history.losses[-1])

    @property
    def ended(self) -> bool:
        return self.diverged or self.step == self.spec.steps

    def train(
        self,
        *,
        eval_every: int,
        save_every: int = 0,
        checkpoint: Path | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Train until the last step, a loss that is no number, or ``stop``."""
        while not self.ended and not stop():
            begin = time.perf_counter()
            loss = self.train_step()
            history = self.history
            history.losses.append(loss)
            history.sent += sum(count for key, count in self.ranks.stats.items() if key.startswith("bytes_"))
            history.seconds += time.perf_counter() - begin
            if self.diverged:
                return
            if self.step % eval_every == 0 or self.step == self.spec.steps:
                history.curve.append((self.step, self.evaluate()))
                if isinstance(self.ranks, ScapeRanks):
                    history.norms.append((self.step, self.ranks.residual_norm()))
            if checkpoint is not None and save_every and self.step % save_every == 0 and self.step < self.spec.steps:
                self.save(checkpoint)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean validation loss in nats a token over the held-out windows that a launch reads too."""
        self.model.eval()
        losses = []
        for windows in self.eval_batches:
            tokens = torch.from_numpy(read_windows(self.data.val, windows, self.spec.seq))
            losses.append(float(next_token_loss(self.model, tokens)))
        self.model.train()
        return statistics.fmean(losses)

    def save(self, path: Path) -> None:
        """Everything that changes, in one file: shared storages stay shared (parameters are views of a buffer)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.draft")
        torch.save(
            {"spec": self.spec.model_dump(), "model": self.model, "ranks": self.ranks, "step": self.step}
            | {"history": self.history, "params": self.params},
            draft,
        )
        draft.replace(path)

    def load(self, path: Path) -> None:
        """Go on where ``save`` left off.

        Raises:
            ValueError: the file is of another run.
        """
        state = torch.load(path, weights_only=False)  # our own file, written by `save`
        if state["spec"] != self.spec.model_dump():
            raise ValueError(f"{path} is a checkpoint of another run; remove it")
        self.model, self.ranks, self.params = state["model"], state["ranks"], state["params"]
        self.step, self.history = state["step"], state["history"]

    def result(self) -> dict[str, Any]:
        """What the run says, for its JSON file."""
        history, steps = self.history, self.spec.steps
        last_quarter = history.losses[-max(1, steps // 4) :]
        return {
            "spec": self.spec.model_dump(),
            "diverged": self.diverged,
            "tuning_loss": None if self.diverged else statistics.fmean(last_quarter),
            "val_loss": None if self.diverged else history.curve[-1][1],
            "curve": history.curve,
            "train_curve": _means([x for x in history.losses if math.isfinite(x)], 16),
            "residual_norm": history.norms,
            "visits": self._visits(),
            "bytes_per_step": history.sent / max(1, self.step),
            "skipped_steps": self.ranks.skipped,
            "params": count_parameters(self.model),
            "tokens": self.step * self.spec.world * self.spec.micro_batch * self.spec.seq,
            "epochs": self.order.epoch(self.step - 1) + 1,
            "data_key": self.data.meta["key"],
            "step_ms": history.seconds * 1e3 / max(1, self.step),
        }

    def _visits(self) -> dict[str, float] | None:
        """Quantiles over the elements of how often each was synchronised; None for a dense method."""
        if self.ranks.visits is None:
            return None
        visits = self.ranks.visits[: count_parameters(self.model)].float().sort().values
        places = {f"p{percent}": percent / 100 for percent in (1, 5, 25, 50, 75, 95, 99)}
        quantiles = {name: float(visits[int(share * (len(visits) - 1))]) for name, share in places.items()}
        return {"never": float((visits == 0).float().mean()), "mean": float(visits.mean()), **quantiles}


def _means(values: list[float], pieces: int) -> list[float]:
    """The means of equal pieces of a list, in order."""
    size = max(1, len(values) // pieces)
    return [round(statistics.fmean(values[i : i + size]), 5) for i in range(0, len(values), size)]
