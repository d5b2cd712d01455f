"""The report from every kind of source, and what it says of bad ones."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from evals.report.__main__ import main
from evals.report.figures import label, looks, time_split
from evals.report.runs import Run, smooth
from evals.report.sources import read_path, read_runs
from evals.report.tables import results as results_table

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


def config(kind: str = "AdamW", lr: float = 1e-3, **params: Any) -> dict[str, Any]:
    optimizer = {"type": kind, "params": {"lr": lr, **params}}
    return {"kind": "config", "params": 1000, "world_size": 2, "seed": 0, "deepspeed": {"optimizer": optimizer}}


def steps(count: int, *, scale: float = 1.0, validate: int = 10, scape: bool = False) -> list[dict[str, Any]]:
    rows = []
    for n in range(1, count + 1):
        row = {"kind": "step", "step": n, "loss": 3 + scale / n, "wall_s": n / 10, "tokens": 64 * n, "step_ms": 10.0}
        row |= {"bytes_sent": 100.0, "ms_forward": 3.0, "ms_backward": 4.0, "ms_engine_step": 2.5}
        if validate and n % validate == 0:
            row["val_loss"] = 3 + scale / n
        if scape:
            row |= {"scape/ms_reduce": 1.0, "scape/ms_pack": 0.5, "scape/grad_norm": 1.0, "scape/visits": n / 10}
        rows.append(row)
    if scape:
        rows[-1] |= {"scape/visits_hist_0": 0.2, "scape/visits_hist_1": 0.5, "scape/visits_hist_2": 0.3}
        rows[-1] |= {"scape/residual_norm": 2.0, "scape/mask_overlap": 0.4}
    return rows


def write_run(folder: Path, records: list[dict[str, Any]], tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return folder


SUMMARY = {"kind": "summary", "bytes_per_step": 100.0, "diverged": False}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three runs under one folder: a dense one, a sparse one, and one that was killed before it ever validated."""
    write_run(tmp_path / "runs" / "adamw", [config(), *steps(40), SUMMARY])
    write_run(
        tmp_path / "runs" / "scape",
        [config("SCAPE", 5e-4, sparsity=0.9), *steps(40, scale=0.5, scape=True), SUMMARY],
    )
    write_run(tmp_path / "runs" / "killed", [config(lr=2e-3), *steps(5, validate=0)], '{"kind": "step", "st')
    return tmp_path


def test_both_pages_tell_the_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(folder / "runs"), "-o", str(folder / "report"), "--title", "A < B & C"])
    page, text = ((folder / "report" / f"report.{kind}").read_text() for kind in ("html", "md"))
    for shown in (page, text):
        assert "SCAPE 90%, lr 0.0005" in shown and "3.0125" in shown and "-0.41%" in shown
        assert "has no validation loss" in shown and "the last line of metrics.jsonl could not be read" in shown
    assert "A &lt; B &amp; C" in page
    assert not re.search(r'(src|href)="(?!#)', page), "the page needs something from elsewhere"
    assert "@import" not in page and "url(http" not in page
    pictures = re.findall(r"!\[.*?\]\((figures/\w+\.svg)\)", text)
    assert [Path(p).stem for p in pictures] == ["loss", "time", "visits", "health"]
    for picture in pictures:
        ET.parse(folder / "report" / picture)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) and page.count("<svg") == 4
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page))
    assert used <= set(ids)
    assert not list((folder / "report").rglob("*.part"))
    assert "killed" in capsys.readouterr().err


def test_every_colour_of_the_page_has_a_dark_twin(folder: Path) -> None:
    main([str(folder / "runs"), "-o", str(folder / "report")])
    page = (folder / "report" / "report.html").read_text()
    drawn = page[page.index("<h1>") :]
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) == set()
    for name in set(re.findall(r"var\((--[\w-]+)\)", page)):
        assert page.count(f"{name}:") == 2, name


def test_the_same_runs_give_the_same_page(folder: Path) -> None:
    for name in ("a", "b"):
        main([str(folder / "runs"), "-o", str(folder / name)])
    assert (folder / "a" / "report.html").read_text() == (folder / "b" / "report.html").read_text()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone", None, "no such run"),
        ("empty", {}, "holds no metrics.jsonl"),
        ("run", {"metrics.jsonl": ""}, "no config record"),
        ("run", {"metrics.jsonl": "no JSON\n"}, "no config record"),
        ("run", {"metrics.jsonl": json.dumps(config()) + "\n"}, "none of the runs has a step"),
        ("x.json", '{"a": 1}', "expected a list of history rows"),
        ("x.json", "[1", "not valid JSON"),
        ("x.csv", "loss\n1\n", "no column is a step"),
        ("x.csv", "", "holds no rows"),
        ("x.txt", "hello", "neither .jsonl nor"),
    ],
)
def test_what_is_no_run_is_named(
    tmp_path: Path, name: str, content: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if isinstance(content, dict):
        path.mkdir()
        for file, text in content.items():
            (path / file).write_text(text)
    elif content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as error:
        main([str(path), "-o", str(tmp_path / "report")])
    assert message in str(error.value) and str(error.value).startswith("evals.report: error: ")
    assert not (tmp_path / "report" / "report.html").exists()


def test_a_history_as_csv_and_as_json(tmp_path: Path) -> None:
    rows = [{"_step": n, "loss": 4 - n / 10, "_runtime": n, "val_loss": 3.0 if n == 5 else None} for n in range(1, 6)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    lines = [
        "_step,loss,_runtime,val_loss",
        *(f"{r['_step']},{r['loss']},{r['_runtime']},{r['val_loss'] or ''}" for r in rows),
    ]
    (tmp_path / "b.csv").write_text("\n".join(lines) + "\n")
    for run in read_runs([tmp_path / "a.json", tmp_path / "b.csv"]):
        assert run.points("loss", "wall_s") == ([1, 2, 3, 4, 5], pytest.approx([3.9, 3.8, 3.7, 3.6, 3.5]))
        assert run.points("val_loss", "step") == ([5], [3.0])
    main([str(tmp_path / "a.json"), str(tmp_path / "b.csv"), "-o", str(tmp_path / "report")])


def test_an_exported_panel_has_several_runs(tmp_path: Path) -> None:
    head = (
        '"Step","fast - run - loss","fast - run - loss__MIN","fast - run - loss__MAX","slow - loss","slow - loss__MIN"'
    )
    (tmp_path / "panel.csv").write_text(head + '\n"1","4.0","4.0","4.0","5.0","5.0"\n"2","3.5","3.5","3.5","",""\n')
    fast, slow = read_path(tmp_path / "panel.csv")
    assert (fast.name, slow.name) == ("fast - run", "slow")
    assert fast.points("loss", "step") == ([1, 2], [4.0, 3.5]) and slow.points("loss", "step") == ([1], [5.0])


def test_steps_done_again_after_a_resume_count_once(tmp_path: Path) -> None:
    again = {**config(), "resumed_from": 3}
    write_run(tmp_path / "r", [config(), *steps(5), again, *[s for s in steps(6, scale=2) if s["step"] > 3]])
    (run,) = read_path(tmp_path / "r")
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5, 6]
    assert run.rows[3]["loss"] == 3.5


def test_bytes_of_older_records_are_added_up() -> None:
    rows = [{"step": 1, "bytes_sent": 10.0}, {"step": 5, "bytes_sent": 100.0}, {"step": 6, "bytes_sent": None}]
    assert Run("r", rows).values("bytes_cumulative") == [10.0, 410.0]


def test_the_split_adds_up_to_the_step() -> None:
    run = Run("r", steps(40, scape=True))
    assert time_split(run) == {"forward": 3.0, "backward": 4.0, "pack": 0.5, "reduce": 1.0, "not told apart": 1.5}
    assert time_split(Run("r", [{"step": 1, "loss": 1.0}])) == {}


def test_labels_tell_runs_apart() -> None:
    runs = [Run(f"run{i}", steps(2), config(lr=lr)) for i, lr in enumerate((1e-3, 2e-3, 2e-3))]
    assert [label(run, runs) for run in runs] == ["AdamW, lr 0.001", "run1", "run2"]
    assert label(runs[0], runs[:1]) == "AdamW"


def test_visits_and_the_gap_to_dense() -> None:
    dense, sparse = Run("d", steps(40), config()), Run("s", steps(40, scale=2), config("SCAPE", sparsity=0.99))
    assert (dense.visits, sparse.visits) == (40.0, pytest.approx(0.4))
    longer = Run("l", steps(50), config())
    head, rows = results_table([dense, sparse], looks([dense, sparse]))
    gap = head.index("to best dense")
    assert results_table([sparse, longer], looks([sparse, longer]))[1][0][gap] == "–"  # not of as many steps
    assert rows[0][gap] == "+0.00%" and rows[1][gap] == f"{3.05 / 3.025 - 1:+.2%}"


def test_many_runs_of_one_method_and_many_methods(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"s{i}", [config(lr=i + 1), *steps(20), SUMMARY]) for i in range(9)]
    runs += [write_run(tmp_path / f"m{i}", [config(f"M{i}"), *steps(20), SUMMARY]) for i in range(9)]
    main([*map(str, runs), "-o", str(tmp_path / "report")])


def test_means_over_stretches() -> None:
    xs = list(range(1000))
    few, means = smooth((xs, xs), 10)
    assert few == means == [49.5 + 100 * i for i in range(10)]
    assert smooth(([1], [2]), 10) == ([1], [2])
