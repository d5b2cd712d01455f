"""A model with everything that has broken other people's checkpoints, and data that do not depend on the world size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.dist import tiny

GLOBAL_BATCH = 12  # rows of a step; divisible by 1, 2, 3 and 4 ranks
VOCAB, WIDTH = 29, 7


class OddNet(nn.Module):
    """Tied, frozen, unused, zero-sized, one-element and odd-sized parameters, and buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.up = nn.Linear(WIDTH, 13)
        self.norm = nn.LayerNorm(13)
        self.down = nn.Linear(13, WIDTH, bias=False)
        self.decode = nn.Linear(WIDTH, VOCAB, bias=False)
        self.decode.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.randn(5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, pairs: Tensor) -> Tensor:
        if self.training:
            self.calls += torch.tensor([1.0, 2.0, 0.5])
        x = self.fixed(self.embed(pairs[:, 0]))
        x = self.down(torch.tanh(self.norm(self.up(x)))) * self.gain
        return nn.functional.cross_entropy(self.decode(x).float(), pairs[:, 1])


def three_groups(model: OddNet) -> list[dict[str, Any]]:
    """Matrices, vectors, and a group of one element, smaller than any world but one rank."""
    own = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in own if p.dim() > 1]
    vectors = [p for name, p in own if p.dim() == 1 and name != "gain"]
    return [
        {"params": matrices, "lr": 6e-3, "weight_decay": 0.1},
        {"params": vectors, "lr": 1e-2, "weight_decay": 0.0},
        {"params": [model.gain], "lr": 1e-3, "weight_decay": 0.0},
    ]


def rows(step: int, micro: int, rank: int, world: int) -> Tensor:
    """(GLOBAL_BATCH / world, 2): this rank's rows of a batch that is the same for every world size."""
    pairs = tiny.batch(step, 0, micro, GLOBAL_BATCH) % VOCAB
    return pairs[rank::world]


def train_step(engine: Any, step: int) -> float:
    """One optimizer step; the loss over the global batch."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    total = torch.zeros(())
    for micro in range(engine.gradient_accumulation_steps()):
        loss = engine(rows(step, micro, rank, world))
        engine.backward(loss)
        engine.step()
        total += loss.detach().float() / engine.gradient_accumulation_steps()
    torch.distributed.all_reduce(total)
    return float(total) / world


def settings(case: dict[str, Any], world: int) -> dict[str, Any]:
    """The DeepSpeed configuration of a case (name, stage, dtype, params, top)."""
    top: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 6e-3, "warmup_num_steps": 12}},
    }
    if case["dtype"] == "fp16":
        top["fp16"] = {"enabled": True, "initial_scale_power": 14, "loss_scale_window": 5}
    return tiny.config(
        case["stage"], case["dtype"], top={**top, **case.get("top", {})}, weight_decay=0.1, **case.get("params", {})
    )


def build(case: dict[str, Any], seed: int = 0) -> Any:
    model = OddNet(seed)
    return tiny.start(settings(case, torch.distributed.get_world_size()), model, three_groups(model))
