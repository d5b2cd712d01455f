"""From rounds to ratios, verdicts, CSV and Markdown; the order of rounds; the wall-clock to a loss; the predictions."""

from __future__ import annotations

import argparse
import csv
import io
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evals.files import grid
from evals.network.__main__ import bandwidths, build_parser, check
from evals.network.bystanders import Bystanders
from evals.network.loss import Curve
from evals.network.loss import table as loss_table
from evals.network.measure import Comparison, Row, Settings, block_request, order_of, rounds_of, speed, step_ms
from evals.network.methods import CLOSE, METHODS
from evals.network.predict import check_all, cluster_of, gather_factor
from evals.network.report import Table, as_csv, markdown, read_csv, verdicts

WHERE = {
    "preset": "gpt-10m", "tokens": "256", "commit": "abc", "date": "2026-11-29", "hardware": "2 x CPU",
    "torch": "2.13", "deepspeed": "0.19.8", "command": "python -m evals.network",
}  # fmt: skip
P = 10_000_000


def row(method: str, ms: list[float], mbit: float | None = 200.0, sent: float = 0.0, counted: float = 0.0) -> Row:
    return Row(2, mbit, method, P, dict(enumerate(ms)), sent, counted, {"ms_reduce": 1.5} if "scape" in method else {})


def leveled(method: str, beside: list[float], compute: list[float], mbit: float | None = 200.0) -> Row:
    """A row whose rounds took ``compute`` ms of forward and backward, and ``beside`` more."""
    made = row(method, [b + c for b, c in zip(beside, compute, strict=True)], mbit)
    made.compute_ms = dict(enumerate(compute))
    return made


def table(scape: float = 400.0, mbit: float = 200.0, bytes_factor: float = 1.01) -> Table:
    sent = 0.047 * P
    return Table([
        row("compute", [380, 390, 400], mbit), row("zero2", [3500, 3600, 3700], mbit), row("powersgd", [600] * 3, mbit),
        row("scape99", [scape] * 3, mbit, sent * bytes_factor, sent), row("mock99", [395] * 3, mbit),
    ])  # fmt: skip


def test_ratios_are_taken_inside_a_round() -> None:
    """A machine that slows down from round to round changes both; the ratio of the medians would not see that."""
    rows = [row("zero2", [100, 200, 400]), row("scape99", [50, 110, 400 / 3])]
    assert Table(rows).ratio((2, 200.0), "zero2", "scape99") == 2.0


def test_ratios_use_only_rounds_that_both_have() -> None:
    slow, fast = row("zero2", [100, 200]), row("scape99", [50, 100])
    fast.ms |= {2: 1.0, 3: 1.0, 4: 1.0}
    assert Table([slow, fast]).ratio((2, 200.0), "zero2", "scape99") == 2.0
    assert Table([slow]).ratio((2, 200.0), "zero2", "scape99") is None


def test_close_rivals_are_compared_as_if_the_machine_had_been_as_fast_for_both() -> None:
    """Each block meets another speed of the machine; what is added to forward and backward is what tells them apart."""
    rows = [
        leveled("compute", [10, 10, 10], [400, 500, 300]),
        leveled("mock99", [20, 20, 20], [300, 400, 400]),
        leveled("scape99", [38, 38, 38], [500, 400, 600]),
    ]
    both = Table(rows, cores=2)
    assert both.compute((2, 200.0)) == 400 and both.beside((2, 200.0), "scape99") == 38
    assert both.level_ratio((2, 200.0), "scape99", "mock99") == pytest.approx(438 / 420)
    assert both.level_ms((2, 200.0), "scape99") == 438  # 538 as it ran
    assert both.level_ratio((2, 200.0), "compute", "scape99") == pytest.approx(410 / 438)
    (verdict,) = [v for v in verdicts(both) if "the mock" in v.target]
    assert verdict.met and verdict.found == f"{438 / 420:.3f} ({638 / 420:.3f} as it ran)"
    rows.append(leveled("zero2", [3000, 3000, 3000], [400, 400, 400]))  # sends in its backward
    assert Table(rows, cores=2).level_ratio((2, 200.0), "zero2", "scape99") is None
    crowded = Table(rows, cores=1)  # who waits and who is slow cannot be told apart
    assert crowded.level_ratio((2, 200.0), "scape99", "mock99") == crowded.ratio((2, 200.0), "scape99", "mock99")


def test_others_are_leveled_by_their_forward() -> None:
    """A machine half as fast in one round shows in the forward; what was sent then did not get slower."""
    slow = leveled("zero2", [3000, 3000], [400, 800])
    slow.forward_ms = {0: 130.0, 1: 260.0}
    usual = leveled("compute", [0, 0, 0], [400, 400, 400])
    usual.forward_ms = {0: 130.0, 1: 130.0, 2: 130.0}
    half = leveled("zero2-bf16", [3000], [5000])
    half.forward_ms = {0: 1300.0}
    both = Table([slow, usual, half], cores=2)
    assert both.level_ms((2, 200.0), "zero2") == pytest.approx(3400)
    assert both.level_ms((2, 200.0), "compute") == 400
    assert Table([slow, usual], cores=1).level_ms((2, 200.0), "zero2") == pytest.approx(3600)
    assert both.level_ms((2, 200.0), "zero2-bf16") == 8000 and both.level_ms((2, 200.0), "ddp") is None


def said(table: Table, what: str) -> bool:
    (verdict,) = [v for v in verdicts(table) if what in v.target]
    return verdict.met


@pytest.mark.parametrize(
    ("what", "good", "bad"),
    [
        ("the mock", {"scape": 414.0}, {"scape": 416.0}),
        ("compute only", {"mbit": 1000.0, "scape": 405.0}, {"mbit": 1000.0, "scape": 415.0}),
        ("3.26 times", {"scape": 1100.0}, {"scape": 1110.0}),
        ("every peer", {"scape": 599.0}, {"scape": 601.0}),
        ("byte counter", {"bytes_factor": 1.049}, {"bytes_factor": 1.051}),
        ("byte counter", {"bytes_factor": 0.951}, {"bytes_factor": 0.949}),
    ],
)
def test_each_target_is_judged_at_its_edge(what: str, good: dict[str, float], bad: dict[str, float]) -> None:
    assert said(table(**good), what) and not said(table(**bad), what)


def test_the_speed_up_is_asked_only_where_zero_waits_for_the_network() -> None:
    mostly_compute = Table([row("compute", [400]), row("zero2", [1200]), row("scape99", [400])])
    assert not [v for v in verdicts(mostly_compute) if "3.26" in v.target]


def test_csv_comes_back_as_it_was(tmp_path: Path) -> None:
    rows = [row("compute", [1.5, 2.5], None), row("scape99", [3.25], 100.0, 5.0, 4.0), row("probe-4", [0.5], None)]
    rows[0].ms, rows[0].compute_ms = {0: 1.5, 3: 2.5}, {0: 1.0, 3: 2.0}
    rows[0].forward_ms = {0: 0.25, 3: 0.5}
    path = tmp_path / "network.csv"
    path.write_text(as_csv(Table(rows), WHERE))
    assert read_csv(path) == (rows, WHERE)
    lines = list(csv.DictReader(io.StringIO(path.read_text())))
    assert all(line["commit"] == "abc" and line["command"] == "python -m evals.network" for line in lines)


def test_markdown_has_all_settings_verdicts_and_provenance() -> None:
    text = markdown(table(scape=500), WHERE)
    assert "| method | bytes a parameter sent | 200 Mbit |" in text
    assert "| SCAPE 99%, ZeRO-2 | 0.047 | 500 (7.20x) |" in text
    assert "| ZeRO-2 | 0.000 | 3,600 |" in text
    assert "**missed**" in text and "commit abc, 2026-11-29" in text
    assert grid(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_odd_rounds_go_backwards() -> None:
    assert order_of(["a", "b", "c"], 0) == ["a", "b", "c"] and order_of(["a", "b", "c"], 3) == ["c", "b", "a"]


def test_blocks() -> None:
    """SCAPE always gets a lead: at a block's start a mask must be in flight as at its end."""

    def block(method: str, last_ms: float, crowded: bool = False) -> tuple[object, ...]:
        request = block_request(method, last_ms, 3, crowded)
        assert request["do"] == "block" and request["method"] == method
        return request["lead"], request["steps"], request["meet"]

    assert block("zero2", 3000) == (0, 1, False)
    assert block("zero2", 100) == (1, 3, False) and block("zero2", 500) == (1, 1, False)
    assert block("scape99", 500) == (1, 2, False) and block("scape99", 6000) == (1, 1, False)
    assert block("scape90", 2000) == (1, 1, False)
    assert block("mock99", 1000, crowded=True) == (1, 2, False)
    assert block("compute", 500) == (1, 2, False) and block("compute", 500, crowded=True) == (1, 2, True)


def test_only_what_is_close_takes_part_in_every_round() -> None:
    assert [rounds_of("zero2", ms, 8) for ms in (1900, 2100, 4100)] == [3, 2, 1] and rounds_of("zero2", 900, 1) == 1
    assert {rounds_of(name, 5000, 8) for name in CLOSE} == {8}
    assert {METHODS[name].like for name in CLOSE} <= {"", "scape99"} and "scape99" in CLOSE


def test_compute_alone_is_as_slow_as_the_slowest_rank_of_each_step() -> None:
    ranks = [[1.0, 3.0], [3.0, 1.0]]
    assert step_ms("compute", ranks) == 3.0 and step_ms("zero2", ranks) == 2.0


@pytest.mark.parametrize(
    ("mbit", "text"), [(None, "unshaped"), (1000.0, "1 Gbit"), (2500.0, "2.5 Gbit"), (200.0, "200 Mbit")]
)
def test_speeds_in_words(mbit: float | None, text: str) -> None:
    assert speed(mbit) == text


def test_bandwidths_of_the_command_line() -> None:
    assert bandwidths(["unshaped", "1000", "0.5"]) == (None, 1000.0, 0.5)
    for bad in ("0", "-1", "fast", "nan", "inf"):
        with pytest.raises(ValueError, match=f"--mbit {bad}: give a positive number"):
            bandwidths([bad])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hosts", "1"], "--hosts 1: between 2 and 100"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--micro-batch", "0"], "--micro-batch 0"),
        (["--methods", "compute", "mock99"], "--methods mock99: sends the bytes of scape99"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str) -> None:
    args: argparse.Namespace = build_parser().parse_args(arguments)
    with pytest.raises(ValueError, match=said):
        check(args)


def test_bystanders_are_what_the_ranks_did_not_use() -> None:
    machine = iter(
        [SimpleNamespace(user=100.0, nice=10.0, steal=1.0), SimpleNamespace(user=107.0, nice=12.0, steal=1.5)]
    )
    own = iter([20.0, 5.0, 24.0, 6.5])  # a rank and this process, twice
    clock = iter([0.0, 10.0])
    watch = Bystanders([42], lambda: next(machine), lambda pid: next(own), lambda: next(clock))
    assert watch.share() == pytest.approx((9.5 - 5.5) / (10 * (os.cpu_count() or 1)))


class FakeRanks:
    """Replies to blocks at once; ``pids`` as the comparison wants them."""

    pids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.asked = 0

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        self.asked += 1
        return [{"ms": [float(self.asked)]}]


@pytest.mark.parametrize(
    ("shares", "last_ms", "kept", "asked"),
    [
        ([0.01], 100, 1.0, 1),
        ([0.3, 0.02], 100, 2.0, 2),
        ([0.3, 0.1, 0.2], 100, 2.0, 3),  # never quiet: the quietest
        ([0.3], 3000, 1.0, 1),  # all network: not worth the time
    ],
)
def test_a_disturbed_block_is_measured_again(shares: list[float], last_ms: float, kept: float, asked: int) -> None:
    ranks = FakeRanks()
    comparison = Comparison(None, ranks, Settings(), print)  # type: ignore[arg-type]
    comparison.last_ms["zero2"] = last_ms
    found = iter(shares)
    comparison.bystanders = SimpleNamespace(start=lambda: None, share=lambda: next(found))  # type: ignore[assignment]
    replies, share = comparison._undisturbed("zero2", math.inf)
    assert replies[0]["ms"] == [kept] and ranks.asked == asked and share == min(shares)


def test_wall_clock_to_a_loss_is_interpolated() -> None:
    curve = Curve("zero2", 1e-3, [(100, 10.0, 4.0), (200, 20.0, 3.0), (300, 30.0, 3.5)])
    assert curve.reached(3.5) == (150, 15.0)
    assert curve.reached(4.5) == (100, 10.0)
    assert curve.reached(2.0) is None


def test_the_saving_is_against_zero2() -> None:
    dense = Curve("zero2", 1e-3, [(100, 100.0, 3.0)])
    half = Curve("scape90", 1e-3, [(200, 56.7, 3.0)])
    late = Curve("scape99", 1e-3, [(300, 40.0, 3.1)])
    text = loss_table([dense, half, late], 3.0)
    assert "| 200 | 57 | 284 | 43.3% |" in text and "| not within 300 | > 40 | 133 | - |" in text


def synthetic(noise: float = 1.0) -> Table:
    """Rows as an ideal network would give them, from closed forms written out here."""
    rows, compute, local = [], 400.0, 50.0
    for mbit in (None, 1000.0, 100.0):
        rate = 600e6 if mbit is None else 0.956 * mbit * 1e6 / 8
        latency = 0.3
        one_pass = 4 * P / 2 / rate * 1e3 + latency
        rows += [
            leveled("compute", [0.0], [compute], mbit),
            row("ddp", [compute + local + 2 * one_pass], mbit),
            row("zero2", [(compute + local + 3 * one_pass) * (noise if mbit else 1)], mbit),
            leveled("mock99", [2 * latency + 0.05 * P / rate * 1e3], [compute], mbit),
        ]
        rows[-1].interface_bytes = 0.05 * P
    probes = [(4, 0.6), (1 << 20, 0.6 + (1 << 20) / 600e6 * 1e3), (1 << 23, 0.6 + (1 << 23) / 600e6 * 1e3)]
    return Table(rows + [row(f"probe-{size}", [ms], None) for size, ms in probes])


def test_the_planner_is_exact_on_an_ideal_network() -> None:
    checks = check_all(synthetic())
    assert {c.method for c in checks} == {"compute", "ddp", "zero2", "mock99"} and len(checks) == 12
    assert max(abs(c.error) for c in checks) < 1e-3


def test_what_gloos_gather_takes_is_measured_and_used() -> None:
    """A bare all-gather that takes 1.5 times the ring's time at the fastest shaped bandwidth makes ZeRO's as slow."""
    table = synthetic()
    cluster = cluster_of(table, (2, 1000.0), METHODS["zero2"])
    ideal = cluster.all_gather(1 << 23)
    probe = row("probe-gather", [1.5 * ideal * 1e3], 1000.0)
    slower = Table([*table.rows, *table.probes, probe])
    assert gather_factor(slower, 2) == pytest.approx(1.5) and gather_factor(table, 2) == 1.0
    plain, told = ({(c.method, c.setting): c.predicted for c in check_all(t)} for t in (table, slower))
    one_pass = 4 * P / 2 / (0.956 * 100e6 / 8) * 1e3
    assert told["zero2", (2, 100.0)] - plain["zero2", (2, 100.0)] == pytest.approx(0.5 * one_pass, rel=0.06)
    assert told["ddp", (2, 100.0)] == plain["ddp", (2, 100.0)]


@pytest.mark.parametrize(("share", "used"), [(0.5, 0.5), (2.0, 0.956)])
def test_a_link_that_gives_less_than_its_name_says_is_taken_as_measured(share: float, used: float) -> None:
    """Two hosts send 8 MiB each in an all-reduce of as much."""
    probes = [row("probe-4", [0.6], 1000.0), row("probe-8388608", [0.6 + (1 << 23) / (share * 125e6) * 1e3], 1000.0)]
    table = Table([*synthetic().rows, *synthetic().probes, *probes])
    found = {mbit: cluster_of(table, (2, mbit), METHODS["ddp"]).inter.bandwidth for mbit in (1000.0, 200.0)}
    assert found == pytest.approx({1000.0: used * 125e6, 200.0: 0.956 * 25e6})


def test_the_check_sees_a_network_that_behaves_otherwise() -> None:
    assert min(c.error for c in check_all(synthetic(noise=1.3)) if c.method == "zero2") == pytest.approx(
        1 / 1.3 - 1, abs=1e-3
    )


def test_every_method_is_known_to_the_configurations() -> None:
    from evals.network.methods import CONFIGS

    for method in METHODS.values():
        assert not method.config or (CONFIGS / f"{method.config}.json").is_file()
