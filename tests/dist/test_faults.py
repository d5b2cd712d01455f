"""A rank that dies, stops, ends early or has bad gradients: the others end with an error that says so, or go on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evals.network.hosts import Hosts, address, missing
from tests.dist.rank_faults import FATAL, TIMEOUT
from tests.launch import ROOT, extensions_dir, run_ranks

pytestmark = pytest.mark.dist
SCRIPT = Path(__file__).with_name("rank_faults.py")

SAYS = {
    "killed": "has ended",
    "stopped": "is stopped",
    "ended": "has ended",
    "data ends early": "did not come: ended, out of reach, or waiting elsewhere (did their data end early?)",
    "raises": "has ended",
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] if kind in ("ended", "raises") else []) for kind in FATAL],
)  # to the other ranks those two are as one that was killed
@pytest.mark.parametrize(
    ("world", "victim"),
    [
        pytest.param(2, 0, id="W2-rank0", marks=pytest.mark.slow),
        pytest.param(2, 1, id="W2-rank1"),
        pytest.param(4, 2, id="W4-rank2", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_ends_the_others_with_its_name(world: int, victim: int, kind: str) -> None:
    failure = run_ranks(SCRIPT, world, [kind, victim], timeout=200, expect_failure=True)
    ended = time.time()
    assert failure.returncode is not None, failure.output  # by itself
    reports = [result for rank, result in enumerate(failure.results) if rank != victim and result is not None]
    told = [report["error"] for report in reports]
    assert told, failure.output
    assert all(ended - report["began"] < 60 for report in reports)  # since the step of the fault began
    assert all(error.startswith("ScapeRankLost: ") and "optimizer step 4" in error for error in told)
    assert all("Remedy: start the job again from its last checkpoint" in error for error in told)
    named = [error for error in told if SAYS[kind] in error and f"{victim}" in error]
    assert named, told
    assert min(report["seconds"] for report in reports) < TIMEOUT + 15


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bad_or_no_gradients_on_one_rank_are_survived(world: int) -> None:
    for result in run_ranks(SCRIPT, world, ["survivable", 0]):
        assert result["skipped"] == [0, 1, 0, 1, 0, 0, 0, 0]
        assert all(result["equal"])


@pytest.fixture
def two_hosts() -> Iterator[Hosts]:
    if lacks := missing():
        pytest.skip(f"no network of namespaces here: {'; '.join(lacks)}")
    with Hosts(2) as hosts:
        yield hosts


def test_a_cut_between_hosts_ends_both_sides(two_hosts: Hosts, tmp_path: Path) -> None:
    ranks = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "READY": str(tmp_path / f"ready{rank}")}
        env |= {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": address(0), "MASTER_PORT": "29601", "GLOO_SOCKET_IFNAME": "eth0"}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        env |= {"TORCH_EXTENSIONS_DIR": extensions_dir(), "SCAPE_TEST_DEADLINE": str(time.time() + 200)}
        command = two_hosts.command(rank, [sys.executable, str(Path(__file__).with_name("rank_cut.py"))])
        log = open(tmp_path / f"log{rank}", "wb")  # noqa: SIM115
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        deadline = time.monotonic() + 90
        while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline and all(p.poll() is None for p in ranks), _logs(tmp_path)
            time.sleep(0.1)
        subprocess.run(two_hosts.command(1, ["ip", "link", "set", "eth0", "down"]), check=True)
        begin = time.monotonic()
        codes = [process.wait(60) for process in ranks]
        assert time.monotonic() - begin < 60
    finally:
        for process in ranks:
            process.kill()
    assert all(code != 0 for code in codes), _logs(tmp_path)
    said = [(tmp_path / f"log{rank}").read_text() for rank in range(2)]
    cut = ["did not come" in log or "network is cut" in log for log in said]
    # these hosts share /proc: the second to notice may find that the first has ended by then, and both be right
    assert any(cut) and all("ScapeRankLost: " in log for log in said), _logs(tmp_path)
    assert all(known or "has ended" in log for known, log in zip(cut, said, strict=True)), _logs(tmp_path)


def _logs(folder: Path) -> Any:
    return [(folder / f"log{rank}").read_text()[-2000:] for rank in range(2)]
