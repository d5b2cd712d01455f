"""Time of every kernel against its floor and against the torch path.

    python -m evals.kernels                                     # on a GPU: 10 M, 100 M and 1 B elements, 90% and 99%
    python -m evals.kernels --device cpu --elements 10000000    # the compiled CPU loops against the torch twins

The floor of a kernel is the bytes it must move (the formulas stand in its file) over the bandwidth of a copy on the
device, measured in the same run. Writes one CSV, a row a kernel, size and sparsity: milliseconds of our form and of the
torch path, bytes, share of the copy bandwidth, and where it was measured. bf16 gradients and model, fp32 residual.

Target on an H200 (issue 3, demand 5): each contiguous pass at >= 75% of the copy bandwidth; accumulate + top_k + pack +
update + scatter within 1.3 times the sum of their floors; top_k within 3 reads of S (36 bytes an element).
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_scape.adams import Hyper
from deepspeed_scape.config import ScapeOptions
from deepspeed_scape.decay import DecayHistory
from deepspeed_scape.encoding import MaskCode, choose_code
from deepspeed_scape.kernels import Ops, naive, ops_for
from deepspeed_scape.layout import GroupLayout, kept_in_partition
from deepspeed_scape.mask import Moments, select
from evals.provenance import installed, provenance

RESULTS = Path(__file__).parent / "results"
STEP = 1000  # of the delays; the mean delay of a random mask is 1 / density
SECTOR = 32  # bytes that memory moves at least
CONTIGUOUS = ("sum_squares", "accumulate", "top_k", "block_top_k", "update_dense")
COUNTED = ("accumulate", "top_k", "pack", "update", "scatter")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel on one input: how to run it in a given form, and the bytes it must move."""

    name: str
    nbytes: float
    run: Callable[[Ops], Any]


class Bench:
    """Tensors of one partition of S = P elements (a world of one), as after many steps at one sparsity."""

    def __init__(self, elements: int, sparsity: float, device: torch.device) -> None:
        self.size, self.sparsity, self.device = elements, sparsity, device
        self.options = ScapeOptions(sparsity=sparsity, weight_decay=0.1)
        self.kept = kept_in_partition(elements, self.options)
        generator = torch.Generator(device).manual_seed(0)

        def noise(scale: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(elements, dtype=dtype, device=device).normal_(0, scale, generator=generator)

        self.grad = noise(1.0, torch.bfloat16)
        self.residual, self.weight, self.exp_avg = noise(1.0), noise(1.0), noise(0.1)
        self.exp_avg_sq = noise(1.0).square_()
        self.flat = self.weight.bfloat16()
        delay = torch.empty(elements, dtype=torch.float32, device=device).exponential_(
            1 - sparsity, generator=generator
        )
        self.last = (STEP - 1 - delay).clamp_(min=0).to(torch.int32)
        del delay
        self.decay = DecayHistory(device)
        self.decay.load(torch.linspace(0, -0.1, STEP + 1000, dtype=torch.float64))
        self.moments = Moments(gradient=self.residual, exp_avg=self.exp_avg, last=self.last)
        self.index = select(self.moments, STEP, 0.9, self.kept, self.options)
        self.mean = torch.randn(self.kept, generator=generator, device=device)
        self.packed = torch.empty(1, self.kept, device=device)
        self.new = torch.empty(self.kept, dtype=torch.bfloat16, device=device)
        self.hyper = Hyper(lr=1e-5, beta1=0.9, beta2=0.95, eps=1e-8, normalizer="ema")
        self.faults = torch.zeros(1, dtype=torch.int32, device=device)

    def code(self, selection: str) -> MaskCode:
        options = ScapeOptions(sparsity=self.sparsity, selection=selection)  # type: ignore[arg-type]
        kept = kept_in_partition(self.size, options)
        layout = GroupLayout(world_size=1, partition_size=self.size, kept=kept, slots=())
        return choose_code(layout, options)

    def scattered(self, arrays: int, element: int) -> float:
        """Bytes to read and write K sorted places in arrays of S: whole sectors, or all of it where that is less."""
        return arrays * min(2 * SECTOR * self.kept, 2 * element * self.size)

    def cases(self) -> Iterator[Case]:
        """Every kernel, in the order of a step."""
        n, k = self.size, self.kept
        grads, starts, row = [self.grad], [0], self.new.view(1, -1)
        yield Case(name="sum_squares", nbytes=2 * n, run=lambda ops: ops.sum_squares(grads))
        yield Case(name="accumulate", nbytes=10 * n, run=lambda ops: ops.accumulate(self.residual, grads, starts, 1e-3))
        yield Case(name="accumulate_and_measure", nbytes=10 * n, run=self._accumulate_and_measure)
        pack_bytes = 12 * k + self.scattered(1, 4)
        yield Case(name="pack", nbytes=pack_bytes, run=lambda ops: ops.pack(self.residual, self.index, self.packed))
        yield Case(
            name="update", nbytes=14 * k + self.scattered(4, 4), run=self._updates(self.index, self.mean, self.new)
        )
        scatter_bytes = 10 * k + self.scattered(1, 2)
        yield Case(name="scatter", nbytes=scatter_bytes, run=lambda ops: ops.scatter_params(self.flat, self.index, row))
        yield Case(name="top_k", nbytes=12 * n + 8 * k, run=self._top_k)
        yield from self._codes()
        if self.sparsity > 0.95:  # does not depend on it
            dense_out = torch.empty(n, dtype=torch.bfloat16, device=self.device)
            yield Case(name="update_dense", nbytes=38 * n, run=self._updates(None, self.residual, dense_out))

    def _accumulate_and_measure(self, ops: Any) -> None:
        """In one pass on a GPU: what a step would save if nothing were ever skipped or clipped."""
        if ops.__name__.endswith(".gpu"):
            from deepspeed_scape.kernels.accumulate import accumulate_and_measure

            accumulate_and_measure(self.residual, [self.grad], [0], 1e-3)
        else:
            ops.sum_squares([self.grad])
            ops.accumulate(self.residual, [self.grad], [0], 1e-3)

    def _codes(self) -> Iterator[Case]:
        block = self.code("block")
        offsets = torch.empty(block.nbytes, dtype=torch.uint8, device=self.device)
        yield Case(
            name="block_top_k",
            nbytes=12 * self.size + block.nbytes,
            run=lambda ops: ops.block_top_k(self.moments, STEP, 0.9, block, offsets),
        )
        code = self.code("partition")
        encoded = torch.empty(1, code.nbytes, dtype=torch.uint8, device=self.device)
        index = self.index.view(1, -1)
        ops_for(encoded).encode_masks(index, code, encoded)
        yield Case(
            name="encode",
            nbytes=16 * self.kept + code.nbytes,
            run=lambda ops: ops.encode_masks(index, code, encoded),
        )
        yield Case(
            name="decode",
            nbytes=2 * code.nbytes + 8 * self.kept,
            run=lambda ops: ops.decode_masks(encoded, code, self.faults),
        )

    def _top_k(self, ops: Ops) -> Tensor:
        if ops is naive:
            return ops.top_k(self.moments, STEP, 0.9, self.kept, 0)
        return select(self.moments, STEP, 0.9, self.kept, self.options)  # on a CPU its own affair

    def _updates(self, own: Tensor | None, mean: Tensor, out: Tensor) -> Callable[[Ops], None]:
        """Updates of a state of their own, each one step later than the one before: no delay may be 0."""
        weight, exp_avg, exp_avg_sq, last = (t.clone() for t in (self.weight, self.exp_avg, self.exp_avg_sq, self.last))
        steps = itertools.count(STEP)

        def run(ops: Ops) -> None:
            states = (weight, exp_avg, exp_avg_sq)
            ops.update(own, mean, next(steps), states, last, self.decay, self.hyper, out)

        return run


def milliseconds(run: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Median of repeated runs, on a GPU by events around each, with the L2 cache emptied between."""
    run()
    if device.type != "cuda":
        return statistics.median(_timed_on_host(run, seconds))
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    times: list[float] = []
    while len(times) < 5 or (sum(times) < seconds * 1e3 and len(times) < 50):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def _timed_on_host(run: Callable[[], Any], seconds: float) -> list[float]:
    times: list[float] = []
    while len(times) < 5 or (sum(times) < seconds * 1e3 and len(times) < 50):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of copying a large buffer."""
    source = torch.empty(1 << (32 if device.type == "cuda" else 28), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source), device, 0.2) * 1e3


def measure(bench: Bench, bandwidth: float, where: dict[str, str], seconds: float, only: list[str]) -> list[dict]:  # type: ignore[type-arg]
    """One row for each kernel."""
    rows = []
    fast = ops_for(bench.residual)
    for case in bench.cases():
        if only and case.name not in only:
            continue
        ours = milliseconds(lambda run=case.run: run(fast), bench.device, seconds)  # type: ignore[misc]
        try:
            torch_path = milliseconds(lambda run=case.run: run(naive), bench.device, seconds)  # type: ignore[misc]
        except torch.OutOfMemoryError:  # the torch path makes temporaries; ours does not
            torch_path = math.nan
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        row = {
            "kernel": case.name,
            "elements": bench.size,
            "sparsity": bench.sparsity,
            "ms": round(ours, 4),
            "torch_ms": round(torch_path, 4),
            "bytes": int(case.nbytes),
            "copy_share": round(case.nbytes / ours * 1e3 / bandwidth, 3),
            "copy_gb_s": round(bandwidth / 1e9, 1),
            **where,
        }
        rows.append(row)
        print(
            f"{case.name:12} {bench.size:>13,} {bench.sparsity:.0%}  {ours:9.3f} ms  torch {torch_path:9.3f} ms  "
            f"{row['copy_share']:.0%} of copy",
            flush=True,
        )
    return rows


def verdicts(rows: list[dict[str, Any]], device: torch.device) -> list[str]:
    """The targets of the issue, met or missed, for each size and sparsity."""
    lines = []
    for size, sparsity in sorted({(row["elements"], row["sparsity"]) for row in rows}):
        some = {row["kernel"]: row for row in rows if (row["elements"], row["sparsity"]) == (size, sparsity)}
        if all(name in some for name in COUNTED):
            floor = sum(some[name]["bytes"] / (some[name]["copy_gb_s"] * 1e6) for name in COUNTED)
            total = sum(some[name]["ms"] for name in COUNTED)
            lines.append(f"{size:,} {sparsity:.0%}: {' + '.join(COUNTED)} = {total / floor:.2f} x floors (target 1.3)")
        if "top_k" in some:
            reads = some["top_k"]["ms"] * some["top_k"]["copy_gb_s"] * 1e6 / (12 * size)
            lines.append(f"{size:,} {sparsity:.0%}: top_k takes the time of {reads:.2f} reads of S (target 3)")
        slow = [name for name in CONTIGUOUS if name in some and some[name]["copy_share"] < 0.75]
        lines.append(f"{size:,} {sparsity:.0%}: contiguous passes below 75% of copy: {', '.join(slow) or 'none'}")
    return [f"[{device.type}] {line}" for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--elements", type=int, nargs="+", default=[10_000_000, 100_000_000, 1_000_000_000])
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.9, 0.99])
    parser.add_argument("--seconds", type=float, default=0.3, help="of repeated runs for each figure")
    parser.add_argument("--only", nargs="*", default=[], help="kernels by name")
    parser.add_argument("--output", type=Path, default=None, help="default: evals/results/kernels_<device>.csv")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here; --device cpu times the CPU forms")
    if device.type == "cpu":
        torch.set_num_threads(1)
    where = provenance()
    if device.type == "cuda":
        where["hardware"] = torch.cuda.get_device_name(device)
    where["triton"] = installed("triton")
    bandwidth = copy_bandwidth(device)
    print(f"{where['hardware']}: copy at {bandwidth / 1e9:.0f} GB/s")
    rows = []
    for elements in args.elements:
        for sparsity in args.sparsity:
            rows += measure(Bench(elements, sparsity, device), bandwidth, where, args.seconds, args.only)
    print("\n".join(verdicts(rows, device)))
    output = args.output or RESULTS / f"kernels_{device.type}.csv"
    output.parent.mkdir(exist_ok=True, parents=True)
    draft = output.with_suffix(".draft")
    with draft.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    draft.replace(output)


if __name__ == "__main__":
    main()
