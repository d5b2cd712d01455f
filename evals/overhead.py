"""Local work of a SCAPE step against forward and backward, on one core.

    python -m evals.overhead                       # gpt-10m, 64 tokens, 2 ranks, 99% and 90%
    python -m evals.overhead --preset small --rounds 5

One process does what one rank does between its collectives, on the real gradients of a real model, and times it
beside that model's forward and backward in interleaved rounds: every figure is a ratio inside one run. Writes
evals/results/overhead.json. The budget (issue 2, demand 13): select + pack + update <= 15% of forward + backward.

The floor beside it is what moving the cache lines alone would take at the copy bandwidth measured in the same rounds.
At 90% an update finds one of its elements in four of five cache lines, so it moves nearly as much as a dense one.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_scape.buffers import WireBuffers
from deepspeed_scape.config import ScapeOptions
from deepspeed_scape.encoding import encode_mask
from deepspeed_scape.group import ScapeGroup
from deepspeed_scape.layout import ParamSlot, group_layout
from deepspeed_scape.optimizer import Scape
from deepspeed_scape.pages import zeros
from deepspeed_scape.residual import sum_squares
from deepspeed_scape.stopwatch import Stopwatch
from evals.provenance import provenance
from launch.models import build_model, count_parameters, next_token_loss

COUNTED = ("select", "pack", "update")
LINE = 64  # bytes of a cache line
RESULTS = Path(__file__).parent / "results"


def rank_group(model: nn.Module, sparsity: float, world: int) -> ScapeGroup:
    """Rank 0's state for all parameters of ``model`` in one group, as the engine would build it."""
    return group_of([(name, param.numel()) for name, param in model.named_parameters()], sparsity, world)


def group_of(sizes: list[tuple[str, int]], sparsity: float, world: int) -> ScapeGroup:
    """Rank 0's state for parameters of these names and numbers of elements."""
    options = ScapeOptions(sparsity=sparsity, weight_decay=0.1)
    slots, start = [], 0
    for name, numel in sizes:
        slots.append(ParamSlot(name=name, start=start, numel=numel))
        start += numel
    numel = -(-start // (2 * world)) * 2 * world
    layout = group_layout(tuple(slots), numel, world, options)
    master = torch.zeros(layout.partition_size)
    optimizer = Scape([master], **options.model_dump())
    moments = {name: zeros(master.numel(), master.dtype, master.device) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[master] = {"step": torch.zeros(()), **moments}
    return ScapeGroup(
        layout=layout,
        options=options,
        optimizer=optimizer,
        number=0,
        flat=torch.zeros(numel),
        master=master,
        rank=0,
    )


class LocalStep:
    """The parts of a step that need no peer; the other owners' masks and gradients are copies of this one's."""

    def __init__(self, group: ScapeGroup, world: int) -> None:
        self.group, self.world, self.step = group, world, 0
        self.wire = WireBuffers([group], world, torch.float32)
        self.watch = Stopwatch(torch.device("cpu"))

    def run(self, grads: list[Tensor | None]) -> dict[str, float]:
        """One step; milliseconds of each part."""
        group, watch = self.group, self.watch
        self.step += 1
        if group.position is None:
            group.use_masks(torch.stack([torch.arange(group.layout.kept)] * self.world))
        watch.restart()
        sum_squares(grad for grad in grads if grad is not None)
        watch.lap("norm")
        group.accumulate(grads, 1.0)
        watch.lap("accumulate")
        packed, parts = self.wire.send_buffer(None)
        group.pack(parts[0])
        watch.lap("pack")
        mean = packed[0] / self.world
        watch.lap("elsewhere")  # the reduce
        own, rows = self.wire.param_buffer(None)
        group.update(mean, self.step, out=rows[0])
        watch.lap("update")
        gathered = own.expand(self.world, -1).contiguous()
        watch.lap("elsewhere")
        group.scatter(self.wire.split_params(gathered, None)[0])
        watch.lap("scatter")
        index = group.select(self.step)
        watch.lap("select")
        encoded = torch.empty(group.code.nbytes, dtype=torch.uint8)
        encode_mask(index, group.code, encoded)
        watch.lap("encode")
        masks = encoded.expand(self.world, -1).contiguous()
        watch.lap("elsewhere")
        group.use_masks(self.wire.decode_masks(masks)[0])
        watch.lap("decode")
        return dict(watch.laps)

    def floor_bytes(self) -> int:
        """What select, pack and update must move through memory with the mask in use; a line written is also read."""
        group = self.group
        assert group.position is not None
        lines = torch.unique(group.position // (LINE // 4))
        own = int((lines < group.layout.partition_size // (LINE // 4)).sum())  # rank 0: the first partition
        select = 3 * 4 * group.layout.partition_size  # residual, exp_avg, last
        return select + 2 * LINE * lines.numel() + 4 * 2 * LINE * own  # update: master, exp_avg, exp_avg_sq, last


def copy_rate(source: Tensor, target: Tensor) -> float:
    """Bytes read and written per millisecond by a plain copy."""
    start = time.perf_counter()
    target.copy_(source)
    return 2 * source.nbytes / ((time.perf_counter() - start) * 1e3)


def forward_backward(model: nn.Module, tokens: Tensor) -> float:
    """Milliseconds of one forward and backward."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    next_token_loss(model, tokens).backward()
    return (time.perf_counter() - start) * 1e3


def measure(preset: str, tokens: int, world: int, sparsities: list[float], rounds: int) -> dict[str, Any]:
    """Median milliseconds, and the median over rounds of each round's ratio; one sparsity after the other."""
    torch.manual_seed(0)
    model = build_model(preset)
    result: dict[str, Any] = {"params": count_parameters(model)}
    everything: list[float] = []
    source, target = torch.zeros(result["params"]), torch.zeros(result["params"])
    for sparsity in sparsities:
        step = LocalStep(rank_group(model, sparsity, world), world)  # a rank holds one such state, and so do its caches
        laps, compute, rates = [], [], []
        for _ in range(rounds + 3):  # the first rounds fill caches and the moments
            compute.append(forward_backward(model, torch.randint(model.config.vocab_size, (1, tokens + 1))))
            laps.append(step.run([param.grad for param in model.parameters()]))
            rates.append(copy_rate(source, target))
        row = summarize(laps[3:], compute[3:])
        row["copy_gb_per_s"] = statistics.median(rates[3:]) / 1e6
        row["floor"] = statistics.median(
            step.floor_bytes() / rate / base for rate, base in zip(rates[3:], compute[3:], strict=True)
        )
        result[f"{sparsity:g}"] = row
        everything += compute[3:]
    return {**result, "forward_backward_ms": statistics.median(everything)}


def summarize(laps: list[dict[str, float]], compute: list[float]) -> dict[str, Any]:
    """Medians of the parts, and of the shares of each round's own forward and backward."""
    own = [{name: ms for name, ms in lap.items() if name != "elsewhere"} for lap in laps]
    pairs = list(zip(own, compute, strict=True))
    return {
        "ms": {name: statistics.median(lap[name] for lap in own) for name in own[0]},
        "select_pack_update": statistics.median(sum(lap[name] for name in COUNTED) / base for lap, base in pairs),
        "all_local_work": statistics.median(sum(lap.values()) / base for lap, base in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt-10m")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.99, 0.9])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(args.preset, args.tokens, args.world, args.sparsity, args.rounds)
    result |= {"arguments": vars(args), "provenance": provenance(), "processor": platform.processor()}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "overhead.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{args.preset}: {result['params']:,} parameters, forward + backward {result['forward_backward_ms']:.0f} ms")
    for sparsity in args.sparsity:
        row = result[f"{sparsity:g}"]
        parts = "  ".join(f"{name} {ms:.1f}" for name, ms in row["ms"].items())
        print(f"{sparsity:.0%}: select + pack + update {row['select_pack_update']:.1%} (floor {row['floor']:.1%}), "
              f"all local work {row['all_local_work']:.1%}   [ms: {parts}]")  # fmt: skip


if __name__ == "__main__":
    main()
