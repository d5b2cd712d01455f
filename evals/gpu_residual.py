"""The residual in host memory against the one on the device, on a GPU: bits, memory and time of one rank's share.

    python -m evals.gpu_residual
    python -m evals.gpu_residual --elements 1000000000 --ranks 8 --sparsity 0.9
    python -m evals.gpu_residual --device cpu --elements 200000 --bucket 7000     # tries this script out, nothing else

No other rank is needed: what a rank adds to its residual and packs concerns nobody else. One GPU has no other owners to
keep away from it in ``gpu_engine.py``; here it plays rank 1 of several.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_scape import host_residual
from deepspeed_scape.host_residual import HostResidual
from deepspeed_scape.layout import GroupLayout, kept_of
from deepspeed_scape.residual import DeviceResidual, Residual
from deepspeed_scape.streams import SideStream

STEPS, RANK = 6, 1
GIB = 1 << 30


def main() -> None:
    args = parsed()
    host_residual.BUCKET = args.bucket
    device = torch.device(args.device)
    size = args.elements // args.ranks
    layout = GroupLayout(world_size=args.ranks, partition_size=size, kept=kept_of(size, 1 - args.sparsity), slots=())
    print(f"{layout.numel:,} elements, {args.ranks} ranks, sparsity {args.sparsity:g}, bf16 gradients, fp32 residual")
    there, on_device = build(partial(DeviceResidual, layout, torch.float32, device), device)
    here, in_host = build(partial(HostResidual, layout, torch.float32, RANK, device), device)
    first, second = compare(layout, there, here, device)
    moved = 4 * (layout.numel - size)
    print(f"equal to the bit over {STEPS} steps")
    print(f"accumulate + pack: {first.seconds * 1e3:.1f} ms on the device, {second.seconds * 1e3:.1f} ms from the host")
    print(f"  {moved / GIB:.2f} GiB each way, {moved / second.seconds / 1e9:.1f} GB/s, the last write included")
    if device.type == "cuda":
        print(f"  plain copies of pinned memory, both ways at once: {link(device) / 1e9:.1f} GB/s each way")
        print(
            f"device memory: {on_device / GIB:.2f} GiB, or {in_host / GIB:.2f} and {second.peak / GIB:.2f} for the pass"
        )
        if abs(on_device - in_host - moved) > 0.02 * moved:
            sys.exit(f"{(on_device - in_host) / GIB:.2f} GiB of device memory saved, not {moved / GIB:.2f}")


class Cost(NamedTuple):
    """Of a step: seconds until the device has done everything, bytes of device memory that it takes meanwhile."""

    seconds: float
    peak: int


def compare(layout: GroupLayout, there: Residual, here: Residual, device: torch.device) -> tuple[Cost, Cost]:
    """What STEPS steps cost each, the medians; ends the program where the two differ."""
    costs: list[tuple[Cost, Cost]] = []
    for step in range(STEPS):
        grads, starts = gradients(layout, step, device)
        position = mask(layout, step, device)
        sent = [torch.empty(layout.world_size, layout.kept, device=device) for _ in range(2)]
        first, second = (
            timed(partial(one_step, residual, grads, starts, position, out), device)
            for residual, out in zip((there, here), sent, strict=True)
        )
        costs.append((first, second))
        if not torch.equal(*sent):
            sys.exit(f"step {step}: {int((sent[0] != sent[1]).sum())} of {sent[0].numel()} values to send differ")
    if not torch.equal(there.state().cpu(), here.state()):
        sys.exit("the residuals differ after the last step")
    later = costs[1:]  # the first compiles
    first, second = (Cost(*map(statistics.median, zip(*some, strict=True))) for some in zip(*later, strict=True))
    return first, second


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--elements", type=int, default=400_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sparsity", type=float, default=0.99)
    parser.add_argument("--bucket", type=int, default=host_residual.BUCKET, help="elements")
    args = parser.parse_args()
    if args.ranks < 2 or args.elements < 1000 * args.ranks or not 0 < args.sparsity < 1:
        parser.error("at least 2 ranks, 1,000 elements for each, and a sparsity between 0 and 1")
    return args


def build(make: Callable[[], Residual], device: torch.device) -> tuple[Residual, int]:
    """A residual, and the bytes of device memory that it takes."""
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    residual = make()
    return residual, torch.cuda.memory_allocated() - before if device.type == "cuda" else 0


def gradients(layout: GroupLayout, step: int, device: torch.device) -> tuple[list[Tensor], list[int]]:
    """bf16, of large and small parameters, which lie across partitions; every third is missing in odd steps."""
    generator = torch.Generator(device).manual_seed(step)
    grads, starts, start, number = [], [], 0, 0
    while start < layout.numel:
        size = min((layout.numel // 29, 4096, 77)[number % 3], layout.numel - start)
        if step % 2 == 0 or number % 3:
            grads.append(torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16))
            starts.append(start)
        start, number = start + size, number + 1
    return grads, starts


def mask(layout: GroupLayout, step: int, device: torch.device) -> Tensor:
    """(W*K,) int64: K ascending places of every partition, another set at every step."""
    size, kept = layout.partition_size, layout.kept
    every = size // kept
    row = torch.arange(kept, device=device) * every + step % every
    return (row + torch.arange(layout.world_size, device=device).unsqueeze(1) * size).view(-1)


def one_step(residual: Residual, grads: list[Tensor], starts: list[int], position: Tensor, out: Tensor) -> None:
    residual.accumulate(grads, starts, 0.5)
    residual.pack(position, out)


def timed(run: Callable[[], None], device: torch.device) -> Cost:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return Cost(time.perf_counter() - start, 0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return Cost(time.perf_counter() - start, torch.cuda.max_memory_allocated() - before)


def link(device: torch.device) -> float:
    """Bytes a second each way of copying 256 MiB to and fro at once."""
    down, up = (torch.zeros(256 << 20, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    target, source = (torch.zeros(256 << 20, dtype=torch.uint8, device=device) for _ in range(2))
    one, other = SideStream(device), SideStream(device)

    def both() -> None:
        with one.after_compute():
            target.copy_(down, non_blocking=True)
        with other.after_compute():
            up.copy_(source, non_blocking=True)

    return down.numel() / statistics.median(timed(both, device).seconds for _ in range(5))


if __name__ == "__main__":
    main()
