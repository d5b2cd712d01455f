"""The sweep's loop over processes that stand for runs: done, stopped in between, failed, told to stop."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from evals.quality import sweep
from evals.quality.groups import SCAPE99, SEEDS, Entry, rate
from evals.quality.results import Results
from evals.quality.spec import RunSpec

SLEEPS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
time.sleep(60)
"""


def write(folder: Path, spec: RunSpec, loss: float) -> str:
    """A result, as the text of a Python command that writes it."""
    result = {"spec": spec.model_dump(), "diverged": False, "tuning_loss": loss, "val_loss": loss, "step_ms": 1.0}
    return f"open({str(folder / f'{spec.name}.json')!r}, 'w').write({json.dumps(result)!r})"


class Acted(sweep.Sweep):
    """``acts`` gives the command of each start of a run, in order."""

    acts: dict[str, list[str]]
    started: list[str]

    def start(self, spec: RunSpec) -> subprocess.Popen[bytes]:
        self.started.append(spec.name)
        act = self.acts[spec.name].pop(0)
        return subprocess.Popen([sys.executable, "-c", act], stdout=subprocess.PIPE, start_new_session=True)


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    monkeypatch.setattr(sweep, "Results", lambda: Results(tmp_path))
    monkeypatch.setattr(sweep, "POLL_S", 0.05)
    for place, loss in ((-1, 3.1), (0, 3.0), (1, 3.2)):
        exec(write(tmp_path, SCAPE99.run(rate(5e-4, place), 0), loss))
    return SCAPE99


def acted(entry: Entry, folder: Path, acts: dict[int, list[str]]) -> Acted:
    made = Acted(entries=[entry], cache=folder, key="key", runs=folder, parallel=2)
    made.acts = {entry.run(5e-4, seed).name: list(act) for seed, act in acts.items()}
    made.started = []
    return made


def test_stopped_runs_go_on_and_failed_ones_do_not_start_again(entry: Entry, tmp_path: Path) -> None:
    done = {seed: write(tmp_path, entry.run(5e-4, seed), 3.0) for seed in SEEDS}
    made = acted(entry, tmp_path, {1: ["raise SystemExit(3)", done[1]], 2: ["raise SystemExit(1)"], 3: [done[3]]})
    said: list[str] = []
    assert not made.work(1.0, said.append)
    names = {seed: entry.run(5e-4, seed).name for seed in SEEDS}
    assert made.started.count(names[1]) == 2 and made.started.count(names[2]) == made.started.count(names[3]) == 1
    assert any(line.startswith(f"FAILED {names[2]} with status 1") for line in said)
    assert [f["spec"]["seed"] for f in Results(tmp_path).finals(entry)] == [1, 3]


def test_the_budget_ends_runs_that_listen_and_those_that_do_not(entry: Entry, tmp_path: Path) -> None:
    made = acted(entry, tmp_path, {1: [SLEEPS], 2: ["import time; time.sleep(60)"]})
    said: list[str] = []
    before = set(psutil.Process().children(recursive=True))  # of other tests
    begin = time.monotonic()
    assert made.work(1.5 / 60, said.append)
    assert time.monotonic() - begin < 30
    assert sum(line.startswith("stopped ") for line in said) == 2
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]


def test_nothing_starts_where_all_is_done(entry: Entry, tmp_path: Path) -> None:
    for seed in SEEDS:
        exec(write(tmp_path, entry.run(5e-4, seed), 3.0))
    assert acted(entry, tmp_path, {}).work(1.0, lambda text: None)


def test_the_command_names_the_run_and_holds_the_prefix(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(sweep.subprocess, "Popen", lambda command, **_: seen.append(command))
    spec = entry.run(5e-4, 1)
    made = sweep.Sweep(entries=[entry], cache=tmp_path, key="k", runs=tmp_path, parallel=1, prefix="nice -n 5")
    made.start(spec)
    assert seen[0][:4] == ["nice", "-n", "5", sys.executable]
    assert RunSpec.model_validate_json(next(word for word in seen[0] if word.startswith("{"))) == spec
