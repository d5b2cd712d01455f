"""The launch helper itself: every launcher, and that a bad end leaves no process behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch import ROOT, RanksFailed, is_alive, kill_tagged, run_ranks

pytestmark = pytest.mark.dist
SCRIPT = Path(__file__).with_name("rank_launch_helper.py")


@pytest.mark.parametrize(
    ("launcher", "world_size"),
    [pytest.param("direct", 3, marks=pytest.mark.slow), ("deepspeed", 2), ("torchrun", 2)],  # most tests use direct
    ids=lambda v: str(v),
)
def test_every_launcher_runs_the_ranks(launcher, world_size):
    results = run_ranks(SCRIPT, world_size, ["ok", "--x=1"], launcher=launcher)
    assert [r["rank"] for r in results] == list(range(world_size))
    for r in results:
        assert r["world_size"] == world_size
        assert r["sum"] == [world_size * (world_size + 1) / 2] * 3
        assert r["args"] == ["--x=1"]
        assert r["fp16"]
        assert r["extensions"] != os.environ.get("TORCH_EXTENSIONS_DIR")
        assert not is_alive(r["pid"])


def test_a_module_in_a_network_namespace():
    results = run_ranks("tests.dist.rank_launch_helper", 2, ["ok"], module=True, netns=True)
    assert {r["sum"][0] for r in results} == {3.0}
    assert results[0]["netns"] == results[1]["netns"] != os.readlink("/proc/self/ns/net")
    assert 2 * 12 <= results[0]["bytes"] < 100_000  # two ranks' three floats, and little else


@pytest.mark.parametrize(
    ("launcher", "timeout"),
    [pytest.param("direct", 5, id="direct"), pytest.param("torchrun", 25, id="torchrun", marks=pytest.mark.slow)],
)
def test_a_hanging_rank_is_killed_in_time(launcher, timeout):
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=f"timed out after {timeout} s") as failure:
        run_ranks(SCRIPT, 2, ["hang"], timeout=timeout, launcher=launcher, preload=False)
    assert time.monotonic() - start < timeout + 10
    pids = [r["pid"] for r in failure.value.results]
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)
    assert "rank_launch_helper.py" in failure.value.output  # where it hung


@pytest.mark.parametrize(
    ("verb", "status", "says"),
    [("fail", 1, "rank 1 gives up"), ("exit", 3, ""), ("mute", 0, "no report from ranks [1]")],
    ids=["raises", "status", "mute"],
)
def test_a_failed_rank_fails_the_launch(verb, status, says):
    start = time.monotonic()
    failure = run_ranks(SCRIPT, 2, [verb], timeout=60, preload=False, expect_failure=True)
    assert time.monotonic() - start < 30  # the other rank sleeps on, and is not waited for
    assert failure.returncode == status
    assert says in str(failure)
    assert failure.results[0]["rank"] == 0
    assert not is_alive(failure.results[0]["pid"])


def test_an_expected_failure_that_does_not_come():
    with pytest.raises(AssertionError, match="was to fail"):
        run_ranks(SCRIPT, 1, ["mute"], preload=False, expect_failure=True)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_the_ranks_go_when_the_test_process_goes(how, tmp_path):
    # a shell's background job, as CI may be one, has SIGINT ignored, and so would its children
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += (
        f"from tests.launch import run_ranks\nrun_ranks({str(SCRIPT)!r}, 2, ['hang'], timeout=120, preload=False)"
    )
    tests = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        reports = wait_for(lambda: (found := sorted(tmp_path.glob("*/rank.*.json"))) and len(found) == 2 and found)
        pids = [json.loads(p.read_text())["pid"] for p in reports]
        assert all(is_alive(pid) for pid in pids)
        tests.send_signal(how)
        tests.wait(20)
        wait_for(lambda: not any(is_alive(pid) for pid in pids), seconds=10)
    finally:
        tests.kill()
        tests.wait()


def wait_for(condition, seconds: float = 60):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.05)
    return value


def test_kill_finds_a_process_in_another_session():
    tag = f"self-test-{os.getpid()}"
    sleeper = subprocess.Popen(["sleep", "60"], env={**os.environ, "SCAPE_TEST_TAG": tag}, start_new_session=True)
    with contextlib.ExitStack() as stack:
        stack.callback(sleeper.kill)
        wait_for(lambda: Path(f"/proc/{sleeper.pid}/comm").read_text().strip() == "sleep")
        kill_tagged(tag)
        assert sleeper.wait(5) == -signal.SIGKILL
