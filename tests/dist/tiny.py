"""A small model, its data and its configuration, shared by the rank scripts.

Everything is a function of (seed, step, rank, micro-step), so one process can compute what every rank computes.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

import deepspeed_scape  # noqa: F401 (registers SCAPE and AdamS)

VOCAB, WIDTH, BATCH = 48, 24, 4


class TinyNet(nn.Module):
    """Next-token model of about 6,000 parameters; returns the loss of a (B, 2) batch of token pairs."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, VOCAB)

    def forward(self, pairs: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.up(self.embed(pairs[:, 0]))))
        return nn.functional.cross_entropy(self.down(hidden).float(), pairs[:, 1])


def batch(step: int, rank: int, micro: int = 0, size: int = BATCH) -> Tensor:
    """(size, 2) token pairs with something to learn: the next token follows from the first, mostly."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 1009 * rank + micro)
    first = torch.randint(VOCAB, (size,), generator=generator)
    noise = torch.randint(3, (size,), generator=generator)
    return torch.stack([first, (first * 5 + 3 + noise) % VOCAB], dim=1)


def two_groups(model: nn.Module, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with decay, vectors without and with twice the learning rate."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [
        {"params": matrices, "lr": lr, "weight_decay": weight_decay},
        {"params": vectors, "lr": 2 * lr, "weight_decay": 0.0},
    ]


def config(stage: int = 2, dtype: str = "fp32", type: str = "SCAPE", top: dict[str, Any] | None = None, **params: Any):
    """A DeepSpeed configuration; ``params`` are the optimizer's, ``top`` goes in at the top level.

    SCAPE is sparse from the first step on, unless ``params`` say otherwise: most tests take few steps.
    """
    if type == "SCAPE":
        params = {"warmup_steps": 0, **params}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": type, "params": {"lr": 3e-3, **params}},
    }
    if dtype != "fp32":
        settings[dtype] = {"enabled": True}
    return {**settings, **(top or {})}


def start(settings: dict[str, Any], model: nn.Module | None = None, groups: Any = None, **kwargs: Any):
    """A fresh engine; the model is TinyNet and its parameters one group, unless given."""
    model = TinyNet() if model is None else model
    groups = [p for p in model.parameters() if p.requires_grad] if groups is None else groups
    return deepspeed.initialize(model=model, model_parameters=groups, config=settings, **kwargs)[0]


def train_step(engine: Any, step: int, rank: int) -> float:
    """One optimizer step on this rank's data, as many micro-steps as the engine accumulates; the mean loss."""
    micros = engine.gradient_accumulation_steps()
    losses = []
    for micro in range(micros):
        loss = engine(batch(step, rank, micro))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return sum(losses) / micros


def flat_params(engine: Any) -> Tensor:
    """All replica values as one fp32 vector, in the engine's group order."""
    return torch.cat([p.detach().float().reshape(-1) for group in engine.optimizer.bit16_groups for p in group])
