"""The comparison: every method at every bandwidth inside one set of processes, round-robin.

A round is one block of steps of each method, between barriers. Methods of like speed are neighbours in it, since they
are what is compared closely and a machine's speed wanders within seconds; odd rounds go backwards, so that a machine
that gets slower or faster hits both ends alike. Ratios are taken inside a round and their median is reported. What is
held against its ceiling to a few percent takes part in all rounds; a peer that is several times as slow, in the first.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evals.network.bystanders import Bystanders
from evals.network.hosts import Hosts
from evals.network.methods import CLOSE, METHODS
from evals.network.ranks import Ranks

WARM_STEPS = 4  # PowerSGD starts compressing at its third
LONG_MS, SLOW_MS = 300.0, 800.0  # ms of a step: a block has 1 step (2 of CLOSE); it needs no lead
PEER_ROUNDS = 3  # of what is not close to anything
NETWORK_MS, VERY_SLOW_MS = 2000.0, 4000.0  # ms of a step that is mostly network: 2 rounds of it do, or 1
DISTURBED, TRIES = 0.04, 3  # share of the processors that others may use during a block; how often it is tried
PROBE_SIZES = (4, 1 << 20, 1 << 23)  # bytes of the bare all-reduces


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is compared. ``mbits``: bandwidths in Mbit/s, None for unshaped; measured in this order."""

    preset: str = "gpt-10m"
    seq: int = 256
    micro_batch: int = 1
    mbits: tuple[float | None, ...] = (None, 1000.0, 200.0, 100.0)
    methods: tuple[str, ...] = tuple(METHODS)
    rounds: int = 8
    steps: int = 3  # in a block
    minutes: float = 7.0  # for one number of hosts; rounds of what is close are left out when it gets late
    cache: Path = Path("runs/tokens")
    tokens_key: str = ""
    logs: Path = Path("runs/network/logs")


@dataclass
class Row:
    """One method at one bandwidth on one number of hosts; a probe's method is ``probe-<bytes>`` or ``probe-gather``."""

    hosts: int
    mbit: float | None
    method: str
    params: int
    ms: dict[int, float] = field(default_factory=dict)  # by round: per step, of the slowest rank
    interface_bytes: float = 0.0  # per step and rank, mean over the ranks
    counted_bytes: float = 0.0  # the same by SCAPE's own counter
    laps: dict[str, float] = field(default_factory=dict)  # SCAPE: ms of the parts of a step
    others: float = 0.0  # largest share of the processors that anything else used during a block
    compute_ms: dict[int, float] = field(default_factory=dict)  # by round: forward and backward, mean over the ranks
    forward_ms: dict[int, float] = field(default_factory=dict)  # the forward alone

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms.values())


Say = Callable[[str], None]


def order_of(methods: Sequence[str], round_number: int) -> list[str]:
    """The methods as round ``round_number`` goes through them."""
    return list(methods) if round_number % 2 == 0 else list(reversed(methods))


def block_request(method: str, last_ms: float, steps: int, crowded: bool = False) -> dict[str, object]:
    """A block for a method whose last one took ``last_ms`` a step; ``crowded``: ranks share processors.

    Compute alone would let some of them run ahead then, two at a time at full speed, so it meets as the others do.
    """
    slow, close = last_ms > SLOW_MS, method in CLOSE and last_ms < VERY_SLOW_MS
    overlapped = METHODS[method].is_scape  # its mask in flight has to be the steady state's
    if last_ms > LONG_MS:
        steps = min(steps, 2 if close else 1)
    lead, meet = int(overlapped or close or not slow), crowded and METHODS[method].kind == "local"
    return {"do": "block", "method": method, "lead": lead, "steps": steps, "meet": meet}


def rounds_of(method: str, last_ms: float, rounds: int) -> int:
    """In how many of the rounds a method takes part whose last step took ``last_ms``."""
    if method in CLOSE:
        return rounds
    return min(rounds, 1 if last_ms > VERY_SLOW_MS else 2 if last_ms > NETWORK_MS else PEER_ROUNDS)


def step_ms(method: str, ms: list[list[float]]) -> float:
    """Milliseconds a step of a block from each rank's steps.

    Methods that meet in every step take what the slowest rank's block took. Compute alone never meets, so each step
    counts as long as its slowest rank: no synchronous job can be faster.
    """
    if METHODS[method].kind == "local":
        return statistics.fmean(max(step) for step in zip(*ms, strict=True))
    return max(statistics.fmean(own) for own in ms)


class Comparison:
    """One number of hosts with all methods built, ready to be measured at any bandwidth."""

    def __init__(self, hosts: Hosts, ranks: Ranks, settings: Settings, say: Say) -> None:
        self.hosts, self.ranks, self.settings, self.say = hosts, ranks, settings, say
        self.params = 0
        self.last_ms: dict[str, float] = {}
        self.bystanders = Bystanders(ranks.pids)

    def prepare(self) -> None:
        """Start the ranks' work, build every method and warm it up, on an unshaped network."""
        s = self.settings
        start = {"do": "start", "preset": s.preset, "seq": s.seq, "micro_batch": s.micro_batch}
        self.ranks.ask(start | {"cache": str(s.cache.resolve()), "tokens_key": s.tokens_key})
        counted: dict[str, float] = {}
        for name in sorted(s.methods, key=lambda n: METHODS[n].kind == "mock"):  # a mock copies another's bytes
            method = METHODS[name]
            request = {"do": "build", "method": name, "mock_bytes": counted.get(method.like, 0)}
            self.params = self.ranks.ask(request)[0]["params"]
            warm = self.ranks.ask({"do": "block", "method": name, "lead": 0, "steps": 1, "meet": False})
            self.last_ms[name] = step_ms(name, [reply["ms"] for reply in warm])
            if self.last_ms[name] < SLOW_MS or method.hook:
                more = {"do": "block", "method": name, "lead": WARM_STEPS - 2, "steps": 1, "meet": False}
                warm = self.ranks.ask(more)
                self.last_ms[name] = step_ms(name, [reply["ms"] for reply in warm])
            counted[name] = statistics.fmean(reply["counted"] for reply in warm)
            self.say(f"{self.hosts.count} hosts: {method.title} is ready")

    def measure(self, rows: dict[str, Row], rounds: range, deadline: float) -> None:
        """Some rounds at the bandwidth of ``rows``, which get them.

        After ``deadline`` (time.monotonic) no block is measured again, and none of the close rounds begins.
        """
        mbit = next(iter(rows.values())).mbit
        self.hosts.shape(mbit)
        by_speed = sorted(rows, key=lambda name: self.last_ms[name])
        for number in rounds:
            chosen = [n for n in order_of(by_speed, number) if number < rounds_of(n, self.last_ms[n], rounds.stop)]
            if not chosen or number >= PEER_ROUNDS and time.monotonic() > deadline:
                break
            began = time.monotonic()
            for name in chosen:
                self._block(rows[name], number, deadline)
            took = time.monotonic() - began
            self.say(f"{self.hosts.count} hosts, {speed(mbit)}: round {number + 1} of {rounds.stop}, {took:.0f} s")

    def _block(self, row: Row, number: int, deadline: float) -> None:
        replies, others = self._undisturbed(row.method, deadline)
        self.last_ms[row.method] = row.ms[number] = step_ms(row.method, [reply["ms"] for reply in replies])
        row.compute_ms[number] = statistics.fmean(reply["compute"] for reply in replies)
        row.forward_ms[number] = statistics.fmean(reply["forward"] for reply in replies)
        row.others = max(row.others, others)
        done = len(row.ms)
        for name, key in (("interface_bytes", "interface"), ("counted_bytes", "counted")):
            new = statistics.fmean(reply[key] for reply in replies)
            setattr(row, name, getattr(row, name) + (new - getattr(row, name)) / done)
        for lap in replies[0]["laps"]:
            new = statistics.fmean(reply["laps"][lap] for reply in replies)
            row.laps[lap] = row.laps.get(lap, 0.0) + (new - row.laps.get(lap, 0.0)) / done

    def _undisturbed(self, method: str, deadline: float) -> tuple[list[dict[str, Any]], float]:
        """A block, again when others took too much of the processors; the quietest one and their share in it."""
        best: tuple[list[dict[str, Any]], float] | None = None
        for _ in range(TRIES):
            self.bystanders.start()
            crowded = len(self.ranks.pids) > (os.cpu_count() or 1)
            replies = self.ranks.ask(block_request(method, self.last_ms[method], self.settings.steps, crowded))
            share = self.bystanders.share()
            if best is None or share < best[1]:
                best = replies, share
            # a busy neighbour does not slow the network down
            nearly_all_network = method not in CLOSE and self.last_ms[method] > NETWORK_MS
            if share <= DISTURBED or nearly_all_network or time.monotonic() > deadline:
                break
        assert best is not None
        return best

    def probe(self, mbit: float | None) -> list[Row]:
        """Bare collectives at the bandwidth that was measured last."""
        replies = self.ranks.ask({"do": "probe", "sizes": PROBE_SIZES, "repeat": 5})
        rows = []
        for i, size in enumerate(PROBE_SIZES):
            ms = max(reply["seconds"][i] for reply in replies) * 1e3
            rows.append(Row(self.hosts.count, mbit, f"probe-{size}", self.params, {0: ms}, interface_bytes=float(size)))
        ms = max(reply["gather"] for reply in replies) * 1e3
        rows.append(Row(self.hosts.count, mbit, "probe-gather", self.params, {0: ms}, interface_bytes=PROBE_SIZES[-1]))
        return rows


def speed(mbit: float | None) -> str:
    """A bandwidth in words."""
    if mbit is None:
        return "unshaped"
    return f"{mbit / 1000:g} Gbit" if mbit >= 1000 else f"{mbit:g} Mbit"


def compare(count: int, settings: Settings, say: Say) -> list[Row]:
    """Build ``count`` hosts, measure everything, take all down again.

    Raises:
        HostsUnavailable: no network of namespaces here.
        RankFailed: a rank ended, raised or hung.
    """
    deadline = time.monotonic() + 60 * settings.minutes
    with Hosts(count) as hosts, Ranks(hosts, settings.logs / f"{count}-hosts") as ranks:
        comparison = Comparison(hosts, ranks, settings, say)
        comparison.prepare()
        rows = {m: {n: Row(count, m, n, comparison.params) for n in settings.methods} for m in settings.mbits}
        probes = []
        for mbit in settings.mbits:
            comparison.measure(rows[mbit], range(min(PEER_ROUNDS, settings.rounds)), deadline)
            probes += comparison.probe(mbit)
        # what is close is compared in the time that is left, but for unshaped, where nothing is asked of it
        left = [mbit for mbit in settings.mbits if mbit is not None] or settings.mbits
        for i, mbit in enumerate(left):
            share = (deadline - time.monotonic()) / (len(left) - i)
            comparison.measure(rows[mbit], range(PEER_ROUNDS, settings.rounds), time.monotonic() + share)
        return [row for mbit in settings.mbits for row in rows[mbit].values()] + probes
