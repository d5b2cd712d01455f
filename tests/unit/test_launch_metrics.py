"""metrics.jsonl: whole lines, strict JSON, and a reader that understands resumes."""

import json
from pathlib import Path

import pytest

from launch.metrics import MetricsFile, describe_run, read_metrics
from launch.options import ROOT
from launch.schedule import lr_factor
from launch.tracker import format_seconds


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_records_are_strict_json_lines(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path, resume=False)
    file.write("config", {"a": 1})
    file.write("step", {"step": 1, "loss": float("nan"), "nested": {"x": [float("inf"), 2.0]}})
    file.close()
    assert lines(tmp_path) == [
        {"kind": "config", "a": 1},
        {"kind": "step", "step": 1, "loss": None, "nested": {"x": [None, 2.0]}},
    ]


def test_a_half_written_line_is_cut_off_on_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "config"}\n{"kind": "step", "st')
    file = MetricsFile(tmp_path, resume=True)
    file.write("step", {"step": 2})
    file.close()
    assert lines(tmp_path) == [{"kind": "config"}, {"kind": "step", "step": 2}]


def test_a_fresh_run_keeps_the_old_file(tmp_path: Path) -> None:
    for run in range(3):
        file = MetricsFile(tmp_path, resume=False)
        file.write("config", {"run": run})
        file.close()
    assert lines(tmp_path)[0]["run"] == 2
    assert json.loads((tmp_path / "metrics-1.jsonl").read_text())["run"] == 0
    assert json.loads((tmp_path / "metrics-2.jsonl").read_text())["run"] == 1


def test_reader_drops_what_was_done_again(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path, resume=False)
    file.write("config", {"lr": 1})
    for step in (1, 2, 3):
        file.write("step", {"step": step, "try": 0})
    file.write("summary", {"steps": 3})
    file.write("config", {"lr": 1, "resumed_from": 2})
    file.write("step", {"step": 3, "try": 1})
    file.close()
    config, steps, summary = read_metrics(file.path)
    assert config["lr"] == 1
    assert [(s["step"], s["try"]) for s in steps] == [(1, 0), (2, 0), (3, 1)]
    assert summary is None


def test_reader_refuses_another_file(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"kind": "step", "step": 1}\n')
    with pytest.raises(ValueError, match="no config record"):
        read_metrics(tmp_path / "x.jsonl")


def test_description_names_commit_and_versions(tmp_path: Path) -> None:
    told = describe_run(ROOT)
    assert told["versions"]["torch"]
    assert told["versions"]["deepspeed"]
    assert describe_run(tmp_path)["git_commit"] is None


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (187, "3:07"), (3723, "1:02:03")])
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("step", "kind", "factor"),
    [
        (0, "constant", 0.2),
        (3, "constant", 0.8),
        (99, "constant", 1.0),
        (4, "cosine", 1.0),
        (52, "cosine", 0.55),
        (100, "cosine", 0.1),
        (500, "cosine", 0.1),
    ],
)
def test_schedule(step: int, kind: str, factor: float) -> None:
    assert lr_factor(step, kind=kind, warmup=4, steps=100, floor=0.1) == pytest.approx(factor)
