"""From measured rows to one CSV, one Markdown file, and a verdict on every target."""

from __future__ import annotations

import csv
import io
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evals.network.measure import Row, speed
from evals.network.methods import ALIKE, METHODS, PEERS, SCAPES

SEEDS_SPEEDUP = 3.26  # of the seeds, per step, against dense ZeRO
COLUMNS = (
    "hosts", "mbit", "method", "params", "ms", "ms_min", "ms_max", "rounds", "zero2_over", "compute_over", "over_mock",
    "interface_bytes", "counted_bytes", "others", "ms_of_rounds", "compute_of_rounds", "forward_of_rounds",
    "laps_ms", "preset", "tokens", "commit", "date", "hardware", "torch", "deepspeed", "command",
)  # fmt: skip

LEVEL = (
    "The machine's speed wanders by 15% within seconds. Compute only, mocks and SCAPE run the same forward and "
    "backward and send nothing meanwhile, so what is close between them is compared with their common median in the "
    "place of each one's own; in brackets the plain median of the ratios, which alone counts where ranks share cores."
)

Setting = tuple[int, float | None]  # hosts, Mbit/s


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One target: what was asked, what was found, and whether it is met."""

    target: str
    found: str
    met: bool


class Table:
    """Rows by setting and method, and the ratios between them.

    Args:
        cores: of the machine they were measured on; this one's, if not said.
    """

    def __init__(self, rows: Iterable[Row], cores: int | None = None) -> None:
        self.cores = cores or os.cpu_count() or 1
        self.rows = [row for row in rows if row.method in METHODS]
        self.probes = [row for row in rows if row.method not in METHODS]
        self.settings: list[Setting] = list(dict.fromkeys((row.hosts, row.mbit) for row in self.rows))
        self._by_key = {(row.hosts, row.mbit, row.method): row for row in self.rows}

    def get(self, setting: Setting, method: str) -> Row | None:
        return self._by_key.get((*setting, method))

    def crowded(self, setting: Setting) -> bool:
        """Whether ranks shared cores."""
        return setting[0] > self.cores

    def ratio(self, setting: Setting, slower: str, faster: str) -> float | None:
        """Median of ms(slower) / ms(faster) over the rounds that hold both; None when one was not measured."""
        a, b = self.get(setting, slower), self.get(setting, faster)
        if a is None or b is None:
            return None
        return statistics.median(a.ms[number] / b.ms[number] for number in a.ms.keys() & b.ms.keys())

    def compute(self, setting: Setting) -> float | None:
        """Median ms of forward and backward over all that do nothing else meanwhile; None without measurements."""
        rows = [row for name in ALIKE if (row := self.get(setting, name)) is not None]
        found = [ms for row in rows for ms in row.compute_ms.values()]
        return statistics.median(found) if found else None

    def beside(self, setting: Setting, method: str) -> float | None:
        """Median ms of a step less its own forward and backward: what a method of ALIKE adds to them."""
        row = self.get(setting, method)
        if row is None or method not in ALIKE or not row.compute_ms:
            return None
        return statistics.median(row.ms[number] - row.compute_ms[number] for number in row.compute_ms)

    def level_ms(self, setting: Setting, method: str) -> float | None:
        """Median ms of a step, had the machine always run as fast as in the median.

        What a method of ALIKE adds to its own forward and backward goes on top of everybody's median of them. Others
        send in their backward, so only their forward tells how fast the machine was: by that factor the computation in
        their steps is taken to have been longer or shorter. A bf16 model computes something else, and where ranks share
        cores a forward is quick when the others wait for the network; such steps stay as they are.
        """
        row, compute, beside = self.get(setting, method), self.compute(setting), self.beside(setting, method)
        if row is None or compute is None:
            return row.median_ms if row else None
        if beside is not None:
            return compute + beside
        if self.crowded(setting) or not row.forward_ms or "_bf16" in METHODS[method].config:
            return row.median_ms
        usual = self._forward(setting)
        level = [ms - (row.forward_ms[number] / usual - 1) * compute for number, ms in row.ms.items()]
        return statistics.median(level)

    def _forward(self, setting: Setting) -> float:
        rows = [row for name in ALIKE if (row := self.get(setting, name)) is not None]
        return statistics.median(ms for row in rows for ms in row.forward_ms.values())

    def level_ratio(self, setting: Setting, slower: str, faster: str) -> float | None:
        """As ``ratio``, were forward and backward as long in both as ``compute``.

        Where ranks share cores nobody can tell a slow machine from waiting for one's turn: there it is ``ratio``.
        """
        if self.crowded(setting):
            return self.ratio(setting, slower, faster)
        compute, a, b = self.compute(setting), self.beside(setting, slower), self.beside(setting, faster)
        return None if compute is None or a is None or b is None else (compute + a) / (compute + b)


def mock_of(method: str) -> str:
    """The ceiling that a SCAPE method is held against."""
    return "mock99" if "99" in method else "mock90"


def markdown(table: Table, provenance: dict[str, str]) -> str:
    """Every number of hosts as one table of step times and speed-ups, then the targets, then where it comes from."""
    parts = []
    for hosts in dict.fromkeys(hosts for hosts, _ in table.settings):
        parts += [f"### {hosts} hosts", "", *host_table(table, hosts), ""]
    parts += ["### Targets", "", "| target | measured | |", "|---|---|---|"]
    parts += [f"| {v.target} | {v.found} | {'met' if v.met else '**missed**'} |" for v in verdicts(table)]
    parts += ["", LEVEL, "", note(provenance), "", disturbance(table)]
    return "\n".join(parts) + "\n"


def disturbance(table: Table) -> str:
    """What else ran on the machine meanwhile."""
    shares = sorted(row.others for row in table.rows)
    return (
        f"Other processes (and the hypervisor) used {statistics.median(shares):.1%} of the processors in the median "
        f"row's worst block, {shares[-1]:.1%} in the worst of all; above 4% a block is measured up to three times and "
        "the quietest one counts."
    )


def note(provenance: dict[str, str]) -> str:
    """Where the figures come from."""
    p = provenance
    return (
        f"Medians, ms a step; in brackets how many times faster than ZeRO-2, the median of the ratios in each round. "
        f"{p['preset']}, {p['tokens']} tokens a rank and step, one rank a host, all ranks on {p['hardware']}. "
        f"`{p['command']}`, commit {p['commit']}, {p['date']}, torch {p['torch']}, DeepSpeed {p['deepspeed']}."
    )


def host_table(table: Table, hosts: int, methods: Sequence[str] | None = None) -> list[str]:
    """Lines of one table: methods down, bandwidths across."""
    settings = [s for s in table.settings if s[0] == hosts]
    head = "| method | bytes a parameter sent | " + " | ".join(speed(mbit) for _, mbit in settings) + " |"
    lines = [head, "|---|---|" + "---|" * len(settings)]
    for name in methods or METHODS:
        found = [table.get(s, name) for s in settings]
        measured = [row for row in found if row is not None]
        if not measured:
            continue
        sent = statistics.median(row.interface_bytes / row.params for row in measured)
        cells = [cell(table, s, name) for s in settings]
        lines.append(f"| {METHODS[name].title} | {sent:.3f} | " + " | ".join(cells) + " |")
    return lines


def cell(table: Table, setting: Setting, method: str) -> str:
    """``ms (x faster than ZeRO-2)``."""
    row, times = table.get(setting, method), table.ratio(setting, "zero2", method)
    if row is None:
        return "-"
    return f"{row.median_ms:,.0f}" + (f" ({times:.2f}x)" if times is not None and method != "zero2" else "")


def verdicts(table: Table) -> list[Verdict]:
    """Issue 4's targets, each at every setting where it applies."""
    out = []
    for setting in table.settings:
        where = f"{setting[0]} hosts, {speed(setting[1])}"
        for name in (n for n in SCAPES if "99" in n and table.get(setting, n)):
            out += [v for v in (_against_mock(table, setting, name, where), _against_limit(table, setting, name, where),
                                _against_zero(table, setting, name, where), _against_peers(table, setting, name, where))
                    if v is not None]  # fmt: skip
        out += [v for name in SCAPES if (v := _bytes(table, setting, name, where)) is not None]
    return out


def _against_mock(table: Table, setting: Setting, name: str, where: str) -> Verdict | None:
    ratio, found = _close(table, setting, name, mock_of(name))
    if ratio is None or setting[1] is None:
        return None
    title = METHODS[name].title
    return Verdict(target=f"{title}, {where}: at most 1.05 times the mock", found=found, met=ratio <= 1.05)


def _close(table: Table, setting: Setting, slower: str, faster: str) -> tuple[float | None, str]:
    """The ratio of two methods of ALIKE, and how it is told: on level terms, and as it ran."""
    ran, level = table.ratio(setting, slower, faster), table.level_ratio(setting, slower, faster)
    if ran is None or level is None:
        return ran, f"{ran:.3f}" if ran is not None else ""
    return level, f"{level:.3f} ({ran:.3f} as it ran)"


def _against_limit(table: Table, setting: Setting, name: str, where: str) -> Verdict | None:
    ratio, found = _close(table, setting, "compute", name)
    if ratio is None or setting[1] != 1000:
        return None
    title = f"{METHODS[name].title}, {where}: at least 0.95 of the speed of compute only"
    if (mock := _close(table, setting, "compute", mock_of(name))[0]) is not None:
        found += f"; the mock itself: {mock:.3f}"
    return Verdict(target=title, found=found, met=ratio >= 0.95)


def _against_zero(table: Table, setting: Setting, name: str, where: str) -> Verdict | None:
    faster, stretched = table.ratio(setting, "zero2", name), table.ratio(setting, "zero2", "compute")
    if faster is None or stretched is None or setting[1] is None or 1 - 1 / stretched < 0.7:
        return None
    share = f"{1 - 1 / stretched:.0%} of ZeRO-2's step is network"
    title = f"{METHODS[name].title}, {where}: at least {SEEDS_SPEEDUP} times faster than ZeRO-2 ({share})"
    return Verdict(target=title, found=f"{faster:.2f}", met=faster >= SEEDS_SPEEDUP)


def _against_peers(table: Table, setting: Setting, name: str, where: str) -> Verdict | None:
    ratios = {peer: r for peer in PEERS if (r := table.ratio(setting, peer, name)) is not None}
    if not ratios or setting[1] is None:
        return None
    best = min(ratios, key=lambda peer: ratios[peer])
    found = f"{ratios[best]:.2f} times faster than the best, {METHODS[best].title}"
    return Verdict(target=f"{METHODS[name].title}, {where}: faster than every peer", found=found, met=ratios[best] > 1)


def _bytes(table: Table, setting: Setting, name: str, where: str) -> Verdict | None:
    row = table.get(setting, name)
    if row is None or not row.counted_bytes:
        return None
    ratio = row.interface_bytes / row.counted_bytes
    title = f"{METHODS[name].title}, {where}: interface within 5% of the byte counter"
    return Verdict(target=title, found=f"{ratio - 1:+.1%}", met=abs(ratio - 1) <= 0.05)


def as_csv(table: Table, provenance: dict[str, str]) -> str:
    """Every row, probes included, with its ratios and where it comes from."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in [*table.rows, *table.probes]:
        setting = (row.hosts, row.mbit)
        ratios = {
            "zero2_over": table.ratio(setting, "zero2", row.method),
            "compute_over": table.ratio(setting, "compute", row.method),
            "over_mock": table.ratio(setting, row.method, mock_of(row.method)) if row.method in SCAPES else None,
        }
        laps = " ".join(f"{name.removeprefix('ms_')}={ms:.2f}" for name, ms in row.laps.items())
        writer.writerow(
            {
                "hosts": row.hosts, "mbit": "" if row.mbit is None else f"{row.mbit:g}", "method": row.method,
                "params": row.params, "ms": f"{row.median_ms:.3f}", "ms_min": f"{min(row.ms.values()):.3f}",
                "ms_max": f"{max(row.ms.values()):.3f}", "rounds": len(row.ms),
                **{k: "" if v is None else f"{v:.4f}" for k, v in ratios.items()},
                "interface_bytes": f"{row.interface_bytes:.0f}", "counted_bytes": f"{row.counted_bytes:.0f}",
                "others": f"{row.others:.3f}",
                "ms_of_rounds": _pairs(row.ms), "compute_of_rounds": _pairs(row.compute_ms),
                "forward_of_rounds": _pairs(row.forward_ms), "laps_ms": laps,
                **{k: provenance[k] for k in COLUMNS if k in provenance},
            }
        )  # fmt: skip
    return out.getvalue()


def _pairs(by_round: dict[int, float]) -> str:
    return " ".join(f"{number}={ms:.3f}" for number, ms in by_round.items())


def read_table(path: Path) -> tuple[Table, dict[str, str]]:
    """The table that :func:`as_csv` wrote, and its provenance."""
    rows, where = read_csv(path)
    return Table(rows, int(where["hardware"].split(" x ")[0])), where


def read_csv(path: Path) -> tuple[list[Row], dict[str, str]]:
    """The rows and provenance that :func:`as_csv` wrote."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    rows = []
    for line in lines:
        laps, rounds, compute, forward = (
            dict(part.split("=") for part in line[key].split())
            for key in ("laps_ms", "ms_of_rounds", "compute_of_rounds", "forward_of_rounds")
        )
        rows.append(
            Row(
                hosts=int(line["hosts"]),
                mbit=float(line["mbit"]) if line["mbit"] else None,
                method=line["method"],
                params=int(line["params"]),
                ms={int(number): float(ms) for number, ms in rounds.items()},
                compute_ms={int(number): float(ms) for number, ms in compute.items()},
                forward_ms={int(number): float(ms) for number, ms in forward.items()},
                interface_bytes=float(line["interface_bytes"]),
                counted_bytes=float(line["counted_bytes"]),
                others=float(line["others"]),
                laps={f"ms_{name}": float(ms) for name, ms in laps.items()},
            )
        )
    keys = ("preset", "tokens", "commit", "date", "hardware", "torch", "deepspeed", "command")
    return rows, {key: lines[0][key] for key in keys} if lines else {}
