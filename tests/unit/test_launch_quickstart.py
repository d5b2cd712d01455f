"""The quickstart's table and its promise to leave no process behind."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from rich.status import Status

from deepspeed_scape.config import ScapeOptions
from launch import children, quickstart
from launch.children import end_tree, run_command
from launch.options import parse_options
from launch.quickstart import (
    METHODS,
    cells,
    command_of,
    progress,
    ratios,
    remark,
    show_progress,
    steps_from_environment,
    write_results,
)
from tests.fake_programs import add_program

ROOT = Path(__file__).resolve().parents[2]
LINE = "  step 50 of 100, 5 s\n"

NESTED = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True); {then}"
)
SLEEP = "import time; time.sleep(600)"


def row(name: str, sent: float) -> dict[str, Any]:
    return {"method": name, "lr": 1e-3, "final_val_loss": 4.5, "bytes_last_step": sent, "step_ms": 12.34, "params": 7}


def test_end_tree_ends_grandchildren_of_other_sessions() -> None:
    script = NESTED.format(inner=SLEEP, then="print(p.pid, flush=True); p.wait()")
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    grandchild = psutil.Process(int(child.stdout.readline()))
    end_tree(child)
    child.wait(timeout=10)
    child.stdout.close()
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_output_and_status_come_back(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "log.txt"
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    assert run_command([sys.executable, "-c", code], dict(os.environ), log) == 3
    assert sorted(log.read_text().split()) == ["err", "out"]


def test_interrupt_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def interrupted_soon(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        process = popen(*args, **kwargs)
        started.append(process)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        return process

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    monkeypatch.setattr(subprocess, "Popen", interrupted_soon)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_command([sys.executable, "-c", SLEEP], dict(os.environ), tmp_path / "log.txt")
    finally:
        signal.signal(signal.SIGALRM, before)
    deadline = time.monotonic() + 5
    while started[0].poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert started[0].poll() is not None


def test_a_long_command_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "WATCH_S", 0.05)
    stop, seen = tmp_path / "stop", []

    def watch() -> None:
        seen.append(1)
        if len(seen) == 3:
            stop.touch()

    code = f"import pathlib, sys, time\nwhile not pathlib.Path({str(stop)!r}).exists(): time.sleep(0.01)\nsys.exit(4)"
    assert run_command([sys.executable, "-c", code], dict(os.environ), tmp_path / "log.txt", watch) == 4
    assert len(seen) >= 3


def test_progress_is_of_this_run(tmp_path: Path) -> None:
    metrics, now = tmp_path / "metrics.jsonl", time.time()
    assert progress(metrics, now, 100).startswith("starting, ")
    metrics.touch()
    assert progress(metrics, now - 5, 100) == "starting, 5 s"
    metrics.write_text('{"kind": "config"}\n{"kind": "step", "step": 50, "loss": null}\n')
    assert progress(metrics, now - 5, 100) == "step 50 of 100, 5 s"
    os.utime(metrics, (now - 9, now - 9))  # an earlier run's, which pretrain.py moves aside when it starts
    assert progress(metrics, now - 5, 100) == "starting, 5 s"


def test_progress_is_a_line_where_there_is_no_terminal() -> None:
    for terminal in (False, True):
        console = Console(file=io.StringIO(), force_terminal=terminal, soft_wrap=True)
        status = Status("1 of 4", console=console)
        show_progress(console, status, "1 of 4", "step 50 of 100, 5 s")
        told = console.file.getvalue()
        assert (told, status.status) == (("", "1 of 4: step 50 of 100, 5 s") if terminal else (LINE, "1 of 4"))


def test_the_install_shows_what_takes_time(tmp_path: Path) -> None:
    """By a pip that says what pip says; and its failure is the script's."""
    said = """Collecting torch
  Downloading torch-2.13.0-cp311.whl.metadata (29 kB)
  Downloading torch-2.13.0-cp311.whl (915.1 MB)
Processing /wheels/numpy-2.4.6-cp311.whl (from torch)
  Building wheel for deepspeed (setup.py): started
Installing collected packages: torch, numpy"""
    add_program(tmp_path / "bin", "pip", f"cat <<'E'\n{said}\nE\nexit 7")
    add_program(tmp_path, "python", "exit 0")
    script = ROOT / "launch" / "quickstart.sh"
    env = {"PATH": os.environ["PATH"], "VENV": str(tmp_path), "PYTHON": str(tmp_path / "python")}
    done = subprocess.run(["bash", script], env=env, capture_output=True, text=True)
    _, *lines = done.stdout.splitlines()
    downloads = [
        "  Downloading torch-2.13.0-cp311.whl (915.1 MB)",
        "  Building wheel for deepspeed (setup.py): started",
    ]
    assert done.returncode == 7 and lines == [*downloads, "  unpacking: minutes, and the longest silence"]
    assert not (tmp_path / ".complete").exists()


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.config)
def test_commands_are_accepted_by_pretrain(method: quickstart.Method, tmp_path: Path) -> None:
    command = command_of(method, 100, tmp_path)
    args, config = parse_options(command[command.index("--deepspeed_config") :])
    assert (args.steps, args.lr_warmup, args.preset) == (100, 10, "tiny")
    assert config["optimizer"]["params"]["lr"] == method.lr
    assert config["optimizer"]["params"].get("sparsity", 0.0) == pytest.approx(1 - method.density)


def test_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "OUTPUT", tmp_path)
    rows = [row("dense", 1000.0), row("sparse", 10.0)]
    assert ratios(rows) == [1.0, 0.01]
    assert cells(rows[1], 0.01) == ("sparse", "0.001", "4.500", "10", "1.0%", "12.3")
    write_results(rows, 100)
    table = (tmp_path / "table.md").read_text()
    assert "| sparse | 0.001 | 4.500 | 10 | 1.0% | 12.3 |" in table
    assert (tmp_path / "table.json").exists()


def test_remark_says_who_is_behind() -> None:
    assert "So SCAPE 99% must be behind here: QUICKSTART_STEPS=8100" in remark(1500)
    assert "SCAPE 90% 140, SCAPE 99% 14 times" in remark(1500) and "SCAPE 99% 0 times" in remark(60)
    assert "must be" not in remark(8100)
    assert ScapeOptions.model_fields["warmup_steps"].default == quickstart.DENSE_STEPS


def test_steps_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICKSTART_STEPS", "12")
    assert steps_from_environment() == 12
    monkeypatch.setenv("QUICKSTART_STEPS", "many")
    with pytest.raises(SystemExit, match="QUICKSTART_STEPS=many"):
        steps_from_environment()
