"""Is the mask gather hidden? Spans of a step on every rank, as a picture, a trace and a table over bandwidths.

For each bandwidth: how long the gather was in flight, how long forward and backward took, and how long the step stood
waiting for the gather. It is hidden as long as it is shorter than the compute; the slowest bandwidths show the end of
that. Times are medians over steps and ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from evals.files import grid, write
from evals.network.hosts import Hosts
from evals.network.measure import Comparison, Say, Settings, speed
from evals.network.ranks import Ranks

METHOD_OF = {"90%": "scape90", "99%": "scape99"}
MBITS: tuple[float | None, ...] = (None, 1000.0, 200.0, 100.0, 20.0, 5.0)
STEPS, DRAWN = 5, 3
COLOURS = {"forward": "#9ecae1", "backward": "#4292c6", "network": "#e6550d", "local": "#74c476", "mask": "#756bb1"}
NETWORK_LAPS = ("norm", "reduce", "gather", "mask_wait")


def gather_row(label: str, mbit: float | None, replies: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of the table from the ranks' notes; the last gather has nobody who waits for it yet."""
    flights, waits, computes = [], [], []
    for reply in replies:
        waited = [g for g in reply["gathers"][:-1] if "got" in g]
        flights += [g["landed"] - g["begin"] for g in waited]
        waits += [g["got"] - g["asked"] for g in waited]
        spans = [(name, end - begin) for name, begin, end in reply["spans"]]
        forward = [s for name, s in spans if name == "forward"]
        computes += [f + b for f, b in zip(forward, (s for n, s in spans if n == "backward"), strict=True)]
    ms = {key: statistics.median(v) * 1e3 for key, v in (("gather", flights), ("compute", computes), ("wait", waits))}
    return {"method": label, "mbit": mbit, **{f"{key}_ms": value for key, value in ms.items()}}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    headings = ("SCAPE", "bandwidth", "mask gather in flight, ms", "forward + backward, ms", "step waits for it, ms")
    keys = ("gather_ms", "compute_ms", "wait_ms")
    return grid(headings, [(r["method"], speed(r["mbit"]), *(f"{r[key]:.1f}" for key in keys)) for r in rows])


def draw(replies: list[dict[str, Any]], title: str, path: Path) -> None:
    """Every rank as two lanes: what it does, and its mask gather in flight."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    start = min(begin for reply in replies for _, begin, _ in reply["spans"])
    figure, axes = pyplot.subplots(figsize=(11, 1.0 + 0.9 * len(replies)))
    for rank, reply in enumerate(replies):
        for name, begin, end in reply["spans"]:
            if name != "step":
                kind = name if name in COLOURS else "network" if name in NETWORK_LAPS else "local"
                axes.barh(2 * rank, end - begin, left=begin - start, height=0.8, color=COLOURS[kind], linewidth=0)
        for gather in reply["gathers"]:
            begin = max(gather["begin"], start)
            if gather["landed"] > begin:
                width = gather["landed"] - begin
                axes.barh(2 * rank + 1, width, left=begin - start, height=0.5, color=COLOURS["mask"], linewidth=0)
    lanes = [
        (2 * r + i, f"rank {r}{what}") for r in range(len(replies)) for i, what in enumerate(("", ", mask gather"))
    ]
    axes.set_yticks([y for y, _ in lanes], [text for _, text in lanes], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10)
    names = {"network": "waiting for the network (norm, mask, reduce, gather)", "local": "local work of the optimizer",
             "mask": "mask gather in flight"}  # fmt: skip
    patches = [Patch(color=c, label=names.get(kind, kind)) for kind, c in COLOURS.items()]
    axes.legend(handles=patches, fontsize=7, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.35), frameon=False)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def add_flights(trace: Path, reply: dict[str, Any]) -> None:
    """Put the mask gathers into torch's trace, in a lane of their own; its clock is aligned by the first forward."""
    content = json.loads(trace.read_text())
    events = content["traceEvents"]
    first = min((e for e in events if e.get("name") == "forward" and "ts" in e), key=lambda e: e["ts"])
    begin = next(begin for name, begin, _ in reply["spans"] if name == "forward")
    for gather in reply["gathers"]:
        if gather["landed"]:
            at = first["ts"] + (gather["begin"] - begin) * 1e6
            length = (gather["landed"] - gather["begin"]) * 1e6
            events.append({"ph": "X", "name": "mask gather in flight", "pid": first["pid"], "tid": "mask", "ts": at,
                           "dur": length})  # fmt: skip
    write(trace, json.dumps(content))


def run_timeline(args: argparse.Namespace, settings: Settings, where: dict[str, str], say: Say) -> None:
    """Measure, draw and write everything on the first of ``--hosts``."""
    count, rows = args.hosts[0], []
    settings = Settings(**vars(settings) | {"methods": tuple(METHOD_OF.values())})
    trace = (args.runs / "trace-scape90-100mbit.json").resolve()
    args.output.mkdir(parents=True, exist_ok=True)
    with Hosts(count) as hosts, Ranks(hosts, settings.logs / "timeline") as ranks:
        comparison = Comparison(hosts, ranks, settings, say)
        comparison.prepare()
        for mbit in MBITS:
            hosts.shape(mbit)
            for label, method in METHOD_OF.items():
                request = {"do": "timeline", "method": method, "steps": STEPS}
                rows.append(gather_row(label, mbit, ranks.ask(request)))
                say(f"SCAPE {label}, {speed(mbit)}: in flight {rows[-1]['gather_ms']:.1f} ms, "
                    f"waited {rows[-1]['wait_ms']:.2f} ms")  # fmt: skip
        hosts.shape(100)
        request = {"do": "timeline", "method": METHOD_OF["90%"], "steps": DRAWN, "trace": str(trace)}
        replies = ranks.ask(request)
    draw(replies, f"SCAPE 90% on {count} hosts at 100 Mbit/s, {settings.preset}", args.output / "timeline.png")
    add_flights(trace, replies[0])
    text = f"{table(rows)}\n\n{settings.preset}, {where['tokens']} tokens a rank and step, {count} hosts, " \
           f"`{where['command']}`, commit {where['commit']}, {where['date']}, {where['hardware']}.\n"  # fmt: skip
    write(args.output / "timeline.md", text)
    print(text)
    say(f"trace: {trace} (open it in https://ui.perfetto.dev), picture: {args.output / 'timeline.png'}")
