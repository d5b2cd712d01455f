"""The planner against the measurements: what it says for each row, and how far off it is.

Taken from the measurements: forward and backward at each setting (``Table.compute``), as a user gives them with
--compute-ms; and, all of it without a shaped network, what each method does beside them, less the network's share, the
latency of a bare 4-byte all-reduce, and the unshaped bandwidth of a bare 8 MiB one. The rest at 1 Gbit, 200 Mbit and
100 Mbit follows from the nominal bandwidth and 0.956, the share of a shaped Ethernet link that TCP's payload gets; or
from what a bare 8 MiB all-reduce got of the link where that is less, as when the machine has no time for a gigabit. One
thing the planner does not know of gloo: how much of a full-duplex link its all-gather leaves idle, taken from bare
ones of 8 MiB, their median over the shaped bandwidths. Steps are taken on level terms (``Table.level_ms``), since the
machine's speed wanders by 15% within seconds. The unshaped rows are the calibration itself.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from deepspeed_scape.plan.cluster import Cluster, Link
from deepspeed_scape.plan.step import Prediction, Workload, predict_dense, predict_scape
from evals.files import grid
from evals.network.measure import PROBE_SIZES, speed
from evals.network.methods import METHODS, Method
from evals.network.report import Setting, Table

EFFICIENCY = 0.956
NOT_MODELLED = ("zero2-owner",)  # gloo's reduce to one rank after the other is half-duplex: no mode of the planner


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row: what the planner says and what was measured, ms a step."""

    setting: Setting
    method: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def cluster_of(table: Table, setting: Setting, method: Method) -> Cluster:
    """The hosts as the planner sees them."""
    hosts, mbit = setting
    small, bandwidth = _probed(table, (hosts, None))
    if mbit is not None:
        bandwidth = min(bandwidth, mbit * 1e6 / 8 * EFFICIENCY, _probed(table, setting)[1])
    link = Link(latency=small / (2 * (hosts - 1)), bandwidth=bandwidth)
    algorithm = "direct" if method.is_scape else "ring"
    return Cluster(nodes=hosts, gpus_per_node=1, inter=link, intra=link, algorithm=algorithm)  # type: ignore[arg-type]


def _probed(table: Table, setting: Setting) -> tuple[float, float]:
    """Seconds of the smallest bare all-reduce, and bytes a second that each host sends in the largest one.

    No limit is known where nothing was measured, as in tables of single methods.
    """
    hosts, mbit = setting
    probes = {row.method: row.median_ms / 1e3 for row in table.probes if (row.hosts, row.mbit) == setting}
    if mbit is not None and f"probe-{PROBE_SIZES[-1]}" not in probes:
        return 0.0, math.inf
    small, large = probes[f"probe-{PROBE_SIZES[0]}"], probes[f"probe-{PROBE_SIZES[-1]}"]
    return small, 2 * (hosts - 1) / hosts * PROBE_SIZES[-1] / max(large - small, 1e-9)


def gather_factor(table: Table, hosts: int) -> float:
    """Time of gloo's all-gather in units of the planner's ring, over the shaped bandwidths; 1 without measurements."""
    found = [
        row.median_ms / 1e3 / cluster_of(table, (hosts, row.mbit), METHODS["zero2"]).all_gather(PROBE_SIZES[-1])
        for row in table.probes
        if row.method == "probe-gather" and row.hosts == hosts and row.mbit is not None
    ]
    return max(1.0, statistics.median(found)) if found else 1.0


def predicted(method: Method, work: Workload, cluster: Cluster, sent: float, gather_factor: float = 1.0) -> Prediction:
    """The planner's row for a method; ``sent`` is what a rank of a low-rank or mock method sends, in bytes."""
    if method.is_scape:
        return predict_scape(work, cluster, 0.99 if "99" in method.name else 0.9)
    if method.kind == "engine":
        full, reduced = predict_dense(work, cluster), predict_dense(work, cluster, "ddp")
        gather = (full.network - reduced.network) * gather_factor
        if method.name == "zero2-bf16-comm":  # the reduce in bf16, the gather in fp32
            reduced = predict_dense(replace(work, dtype="bf16"), cluster, "ddp")
        network = reduced.network + gather
        return replace(full, network=network, step=full.step - full.network + network)
    if method.kind == "local":
        none = Link(latency=0.0, bandwidth=float("inf"))
        return predict_dense(work, replace(cluster, inter=none, intra=none), "ddp")
    if method.kind == "ddp" and method.hook != "powersgd":
        return predict_dense(work, cluster, "ddp")
    n = cluster.ranks
    message = sent * n / (2 * (n - 1))  # of a ring all-reduce
    return predict_dense(replace(work, params=round(message / 4), dtype="fp32"), cluster, "ddp")


def check_method(table: Table, name: str, hosts: int) -> list[Check]:
    """A method's rows on one number of hosts."""
    method, free, factor = METHODS[name], (hosts, None), gather_factor(table, hosts)
    own, compute = table.get(free, name), table.compute(free)
    if own is None or compute is None:
        return []
    dtype = "bf16" if name in ("zero2-bf16", "ddp-bf16") else "fp32"

    def step(setting: Setting, local: float) -> Prediction:  # ms of compute and local work, seconds in the result
        work = Workload(
            params=own.params,
            compute=(table.compute(setting) or compute) / 1e3,
            dtype=dtype,  # type: ignore[arg-type]
            dense_local=local / 1e3,
            scape_local=local / 1e3,
        )
        return predicted(method, work, cluster_of(table, setting, method), own.interface_bytes, factor)

    local = (table.level_ms(free, name) or 0.0) - compute - step(free, 0.0).network * 1e3
    return [
        Check(
            setting=setting,
            method=name,
            predicted=step(setting, local).step * 1e3,
            measured=level,
        )
        for setting in table.settings
        if setting[0] == hosts and (level := table.level_ms(setting, name)) is not None
    ]


def check_all(table: Table) -> list[Check]:
    """Every row that the planner has a model for and that an unshaped measurement calibrates."""
    hosts = dict.fromkeys(count for count, mbit in table.settings if mbit is None)
    return [
        check
        for count in hosts
        for name in METHODS
        if name not in NOT_MODELLED
        for check in check_method(table, name, count)
    ]


def markdown(checks: list[Check]) -> str:
    """The planner's figure for every row, and its error."""
    settings = list(dict.fromkeys(check.setting for check in checks))
    found = {(check.method, check.setting): check for check in checks}
    rows = []
    for name in dict.fromkeys(check.method for check in checks):
        cells = [found.get((name, setting)) for setting in settings]
        rows.append(
            [METHODS[name].title, *("-" if c is None else f"{c.predicted:,.0f} ({c.error:+.0%})" for c in cells)]
        )
    headings = ["planner, ms (error)", *(f"{hosts} hosts, {speed(mbit)}" for hosts, mbit in settings)]
    note = "Steps on level terms (the machine's speed wanders). Unshaped rows are its calibration."
    return f"### The planner against these figures\n\n{grid(headings, rows)}\n\n{note}\n"
