"""What grows with the work: local work and memory with the parameters, network and step with the ranks.

Parameters from 1 M to 200 M: one process does what a rank does between its collectives, on gradients of that many
elements, and is compared with a straight line and with the planner's memory. Ranks from 2 to 8: real ones, on hosts of
their own; beyond that the planner speaks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed_scape.plan import Cluster, Workload, predict_all
from deepspeed_scape.plan.cluster import Link
from deepspeed_scape.plan.memory import scape as planned_memory
from evals.files import grid, write
from evals.network.measure import Row, Say, Settings, compare, speed
from evals.network.report import Table

SIZES = (1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000, 200_000_000)
TENSOR = 1_000_000  # elements of one parameter
SPARSITY, WORLD, ROUNDS = 0.99, 2, 7
RANKS, MBIT, METHODS_OF_RANKS = (2, 4, 8), 200.0, ("compute", "zero2", "scape99", "mock99")
BEYOND = (16, 64, 256, 1024, 4096)
EFFICIENCY = 0.956  # payload of a shaped link


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def local_work(params: int) -> dict[str, Any]:
    """Median ms of each part of a rank's local work for ``params`` parameters, and the memory it holds."""
    import torch

    from evals.overhead import LocalStep, group_of

    torch.set_num_threads(1)
    warm = LocalStep(group_of([("warm", TENSOR)], SPARSITY, WORLD), WORLD)  # libraries and compiled loops
    warm.run([torch.randn(TENSOR)])
    before = resident()
    sizes = [(f"p{i}", TENSOR) for i in range(params // TENSOR)]
    step = LocalStep(group_of(sizes, SPARSITY, WORLD), WORLD)
    grads = [torch.randn(numel) for _, numel in sizes]
    laps = [step.run(grads) for _ in range(ROUNDS + 2)][2:]  # type: ignore[arg-type]
    parts = [{name: ms for name, ms in lap.items() if name != "elsewhere"} for lap in laps]
    return {
        "params": params,
        "ms": statistics.median(sum(part.values()) for part in parts),
        "parts": {name: statistics.median(part[name] for part in parts) for name in parts[0]},
        "memory": resident() - before,
        "planned_memory": planned_memory(params, WORLD, 1 - SPARSITY, "fp32", "fp32"),
    }


def in_fresh_process(params: int) -> dict[str, Any]:
    """:func:`local_work` where nothing else has been allocated before."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(local_work, (params,))


def params_table(rows: list[dict[str, Any]]) -> str:
    """Markdown; ns per parameter is a constant where the work is linear."""
    headings = ("parameters", "local work, ms", "ns a parameter", "memory, bytes a parameter", "planned")
    cells = [
        (f"{p:,}", f"{row['ms']:.1f}", f"{row['ms'] * 1e6 / p:.2f}", f"{row['memory'] / p:.1f}",
         f"{row['planned_memory'] / p:.1f}")
        for row in rows for p in [row["params"]]
    ]  # fmt: skip
    return grid(headings, cells)


def ranks_table(table: Table) -> str:
    """Markdown: step, network and bytes of real ranks. All share two cores, so compute grows with the ranks here."""
    headings = (
        "ranks", "compute only, ms", "ZeRO-2, ms", "SCAPE 99%, ms", "over its mock", "network of ZeRO-2, ms",
        "of SCAPE 99%, ms", "bytes a parameter sent by ZeRO-2", "by SCAPE 99%",
    )  # fmt: skip
    cells = []
    for setting in table.settings:
        compute, zero, scape = (table.get(setting, name) for name in ("compute", "zero2", "scape99"))
        assert compute is not None and zero is not None and scape is not None
        waited = sum(ms for lap, ms in scape.laps.items() if lap in ("ms_reduce", "ms_gather", "ms_mask_wait"))
        times = [f"{row.median_ms:,.0f}" for row in (compute, zero, scape)]
        networks = [f"{zero.median_ms - compute.median_ms:,.0f}", f"{waited:,.1f}"]
        sent = [f"{zero.interface_bytes / zero.params:.2f}", f"{scape.interface_bytes / scape.params:.3f}"]
        over_mock = f"{table.ratio(setting, 'scape99', 'mock99'):.2f}"
        cells.append([str(setting[0]), *times, over_mock, *networks, *sent])
    return grid(headings, cells)


def planned_table(row: Row) -> str:
    """Markdown: the planner on the same model and links, a core for every rank as at two ranks."""
    compute = row.median_ms / 1e3
    work = Workload(params=row.params, compute=compute, dtype="fp32", dense_local=0.0, memory_bandwidth=1e10)
    cells = []
    for ranks in BEYOND:
        link = Link(latency=5e-4, bandwidth=MBIT * 1e6 / 8)
        cluster = Cluster(nodes=ranks, gpus_per_node=1, inter=link, intra=link, efficiency=EFFICIENCY)
        cells.append([f"{ranks:,}", *(f"{p.step * 1e3:,.0f}" for p in predict_all(work, cluster, [0.9, 0.99]))])
    names = [p.name for p in predict_all(work, cluster, [0.9, 0.99])]
    return grid(["ranks", *(f"{name}, ms" for name in names)], cells)


def run_scaling(args: argparse.Namespace, settings: Settings, where: dict[str, str], say: Say) -> None:
    """Measure both and write scaling.md."""
    local = []
    for params in SIZES:
        local.append(in_fresh_process(params))
        say(f"{params:,} parameters: {local[-1]['ms']:.1f} ms, {local[-1]['memory'] / params:.1f} bytes a parameter")
    settings = replace(settings, mbits=(MBIT,), methods=METHODS_OF_RANKS, seq=args.seq or 64, rounds=args.rounds)
    rows: list[Row] = []
    for count in RANKS:
        rows += compare(count, settings, say)
    found = Table(rows)
    compute = found.get((RANKS[0], MBIT), "compute")
    assert compute is not None
    parts = [
        f"Local work of a rank of {WORLD} at 99%, one core:", params_table(local),
        f"Ranks on hosts of their own at {speed(MBIT)}, {settings.preset}, {settings.seq} tokens a rank and step; all "
        "ranks share this machine's cores:", ranks_table(found),
        "The same model and links beyond that, by the planner:", planned_table(compute),
        f"`{where['command']}`, commit {where['commit']}, {where['date']}, {where['hardware']}.",
    ]  # fmt: skip
    text = "\n\n".join(parts) + "\n"
    write(args.output / "scaling.md", text)
    print(text)
