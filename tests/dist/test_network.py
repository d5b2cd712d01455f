"""evals.network whole, on two real hosts: it measures, its figures hold together, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evals.network.hosts import Hosts, interface_bytes, missing
from evals.network.ranks import RankFailed, Ranks
from evals.network.report import Table, read_csv
from tests.launch import ROOT, is_alive

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(bool(missing()), reason=f"no network of namespaces here: {'; '.join(missing())}"),
]
METHODS = ("compute", "ddp", "powersgd", "zero2", "scape90", "mock90")
COMMAND = [
    sys.executable, "-m", "evals.network", "--hosts", "2", "--preset", "tiny", "--mbit", "unshaped", "10",
    "--rounds", "2", "--steps", "2", "--methods", *METHODS,
]  # fmt: skip


def holders_and_ranks() -> set[int]:
    """Every process on this machine that holds one of our namespaces or is a rank in one."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "evals.network.worker" in words or words[:2] == ["sleep", "infinity"]:
            found.add(int(path.parent.name))
    return found


def start(folder: Path) -> subprocess.Popen[bytes]:
    out = (folder / "out.txt").open("wb")
    arguments = ["--output", str(folder / "results"), "--runs", str(folder / "runs")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    return subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)


def test_the_whole_command(tmp_path: Path) -> None:
    before = holders_and_ranks()
    process = start(tmp_path)
    assert process.wait(240) == 0, (tmp_path / "out.txt").read_text()
    assert holders_and_ranks() <= before
    rows, where = read_csv(tmp_path / "results" / "network.csv")
    table = Table(rows)
    assert where["command"].startswith("python -m evals.network --hosts 2")
    assert {row.method for row in table.rows} == set(METHODS) and len(table.rows) == 2 * len(METHODS)
    free, slow = (2, None), (2, 10.0)
    assert all(len(row.ms) >= 1 for row in table.rows)
    dense, scape = table.get(slow, "zero2"), table.get(slow, "scape90")
    assert dense is not None and scape is not None
    # 6 bytes a parameter through 10 Mbit: the wire alone takes that long, and so it must
    wire = 6 * dense.params / (10e6 / 8) * 1e3
    assert wire < dense.median_ms < 1.6 * wire + 200
    assert dense.median_ms > 2 * table.get(free, "zero2").median_ms  # type: ignore[union-attr]
    assert dense.interface_bytes == pytest.approx(6 * dense.params, rel=0.05)
    assert scape.counted_bytes == pytest.approx(
        0.904 * scape.params / 2, rel=0.02
    )  # fp32: 0.4 + 0.4 + 0.104, times 1/2
    assert scape.interface_bytes == pytest.approx(scape.counted_bytes, rel=0.15)  # headers weigh in such small messages
    queued = 0.4 * scape.params - 32_768  # reduce and gather, less what a full bucket lets through at once
    assert scape.laps["ms_reduce"] + scape.laps["ms_gather"] > queued / (10e6 / 8) * 1e3
    assert table.get(slow, "compute").interface_bytes < 2_000  # type: ignore[union-attr]
    text = (tmp_path / "results" / "network.md").read_text()
    assert "### 2 hosts" in text and "| SCAPE 90%, ZeRO-2 |" in text


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL],  # SIGTERM goes SIGINT's way
    ids=lambda n: n.name,
)
def test_no_end_leaves_anything_behind(tmp_path: Path, number: signal.Signals) -> None:
    before = holders_and_ranks()
    process = start(tmp_path)
    deadline = time.monotonic() + 60
    while len(made := holders_and_ranks() - before) < 5:  # a switch, two hosts, two ranks
        assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "out.txt").read_text()
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(30) != 0
    if number != signal.SIGKILL:
        assert "everything is taken down" in (tmp_path / "out.txt").read_text()
    deadline = time.monotonic() + 10
    while left := {pid for pid in made if is_alive(pid)}:
        assert time.monotonic() < deadline, f"{left} still there"
        time.sleep(0.05)


def test_a_rank_that_fails_is_told_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"rank \d failed\n(.|\n)*KeyError: 'preset'"), Hosts(2) as hosts:
        with Ranks(hosts, tmp_path, timeout=60) as ranks:
            ranks.ask({"do": "start"})
        raise AssertionError("the ranks went on")


def test_two_networks_at_once_do_not_meet() -> None:
    def ping(hosts: Hosts) -> bool:
        return (
            subprocess.run(hosts.command(0, ["ip", "-br", "addr", "show", "eth0"]), capture_output=True).returncode == 0
        )

    with Hosts(2) as one, Hosts(2) as other:
        assert ping(one) and ping(other)
    with pytest.raises(RuntimeError, match="no interface eth0-of-nowhere"):
        interface_bytes("eth0-of-nowhere")
