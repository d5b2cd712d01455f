"""The planner's command line: units, errors, JSON, plots, a run's metrics; and that it starts without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed_scape.plan.__main__ import main
from deepspeed_scape.plan.measured import read_run
from deepspeed_scape.plan.options import checked
from deepspeed_scape.plan.units import bandwidth, count, seconds, show_bandwidth, show_bytes

ROOT = Path(__file__).resolve().parents[2]
BASE = ["--params", "1.8e9", "--nodes", "32", "--bandwidth", "200Gbit", "--compute-ms", "900"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("200Gbit", 25e9),
        ("100 Mbit/s", 12.5e6),
        ("25GB/s", 25e9),
        ("1.5tbit", 187.5e9),
        ("56kbit", 7e3),
        ("200Gbps", 25e9),
    ],
)
def test_bandwidths(text: str, value: float) -> None:
    assert bandwidth(text) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["200", "GB/s", "200Gb", "1.2.3Gbit", "-5Gbit", "0Gbit", "nanGbit", "infGbit", "", "5 us"]
)
def test_bad_bandwidths_name_the_text_and_the_remedy(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a bandwidth: (write it as 200Gbit|it must be positive)") as caught:
        bandwidth(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(("text", "value"), [("5us", 5e-6), ("0.3ms", 3e-4), ("2 s", 2.0), ("700ns", 7e-7)])
def test_times(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value)


@pytest.mark.parametrize(("text", "value"), [("1.8e9", 1_800_000_000), ("1.8B", 1_800_000_000), ("500M", 500_000_000)])
def test_counts(text: str, value: int) -> None:
    assert count(text) == value


@pytest.mark.parametrize("parse, text", [(seconds, "5"), (seconds, "5 parsec"), (count, "0.5"), (count, "1.8X")])
def test_bad_times_and_counts(parse: Any, text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse(text)


def test_shown_units() -> None:
    assert show_bandwidth(25e9) == "200 Gbit" and show_bandwidth(12.5e6) == "100 Mbit"
    assert show_bytes(3.6e9) == "3.6 GB" and show_bytes(12) == "12 B"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--params is missing: parameters of the model: 1.8e9, 500M --nodes is missing"),
        (
            ["--compute-ms", "5 parsec"],
            "--compute-ms 5 parsec: '5 parsec' is not a time: write it as 223, 223ms or 0.2s",
        ),
        (["--nodes", "0", "--dtype", "int8"], "--dtype int8:"),
        (["--nodes", "0", "--dtype", "int8"], "--nodes 0:"),
        (["--bandwidth", "200"], "--bandwidth 200: '200' is not a bandwidth"),
        (["--latency", "5"], "--latency 5: '5' is not a time"),
        (["--nodes", "0"], "--nodes 0:"),
        (["--nodes", "4096", "--gpus-per-node", "2"], "more than 4096 ranks"),
        (["--compute-ms", "0"], "--compute-ms 0:"),
        (["--compute-ms", "nan"], "--compute-ms nan:"),
        (["--sparsity", "1"], "--sparsity 1:"),
        (["--sparsity", "0.9", "x"], "--sparsity x:"),
        (["--dtype", "int8"], "--dtype int8:"),
        (["--efficiency", "1.1"], "--efficiency 1.1:"),
        (["--plot", "x.png"], "--plot x.png: goes with --sweep"),
        (["--from-run", "/nowhere/metrics.jsonl"], "--from-run /nowhere/metrics.jsonl: No such file"),
    ],
)
def test_errors_name_the_flag_and_the_value(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*BASE, *arguments] if arguments else [])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert said in " ".join(told.split()) and told.count("\n") < 8  # not the list of all options


@pytest.mark.parametrize("text", ["900", "900ms", "0.9s", "900 ms", "900000us"])
def test_milliseconds_may_carry_a_unit(text: str) -> None:
    assert checked(
        {"params": "1e9", "nodes": "2", "bandwidth": "1Gbit", "compute_ms": text}
    ).compute_ms == pytest.approx(900)


def test_json_has_every_row_and_the_break_even(capsys: pytest.CaptureFixture[str]) -> None:
    main([*BASE, "--sparsity", "0.9", "0.99", "0.999", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["rows"][2:]] == ["SCAPE 90%", "SCAPE 99%", "SCAPE 99.9%"]
    assert found["ranks"] == 32
    times = [row["step"] for row in found["rows"]]
    assert times[0] >= times[1] > times[2] > times[3] > times[4]
    assert found["rows"][3]["speedup"] == pytest.approx(times[0] / times[3])
    assert set(found["break_even_bytes_per_s"]) == {"0.9", "0.99", "0.999"}


def test_table_shows_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    main(BASE)
    out = capsys.readouterr().out
    for text in ("ZeRO, as DeepSpeed runs it", "ZeRO, true reduce-scatter", "SCAPE 99%", "is faster below"):
        assert text in out


def test_a_residual_in_host_memory_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    main([*BASE, "--residual-device", "cpu", "--host-link", "50GB/s"])
    assert "SCAPE also holds 6.97 GB a rank in pinned host memory" in capsys.readouterr().out
    main(BASE)
    assert "pinned" not in capsys.readouterr().out


@pytest.mark.parametrize("over", ["nodes", "bandwidth"])
def test_sweeps_draw(over: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    main([*BASE, "--gpus-per-node", "4", "--sweep", over, "--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG") and list(tmp_path.iterdir()) == [path]


def write_run(path: Path, world: int, laps: bool) -> Path:
    config = {"kind": "config", "params": 470_528, "world_size": world, "deepspeed": {"bf16": {"enabled": True}}}
    parts = {"scape/ms_norm": 4.0, "scape/ms_reduce": 5.0, "scape/ms_select": 2.0, "scape/ms_update": 1.0}
    steps = [
        {"kind": "step", "step": n, "step_ms": 40.0 if n > 10 else 90.0, **(parts if laps else {})}
        for n in range(1, 40)
    ]
    path.write_text("\n".join(json.dumps(line) for line in [config, *steps]) + "\n")
    return path


def test_a_scape_run_tells_compute_and_local_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "metrics.jsonl", 2, laps=True)
    assert read_run(path) == {"params": 470_528, "dtype": "bf16", "compute_ms": 28.0, "scape_local_ms": 3.0}
    main(["--from-run", str(path), "--nodes", "2", "--bandwidth", "1Gbit", "--compute-ms", "50", "--json"])
    assert json.loads(capsys.readouterr().out)["options"]["compute_ms"] == 50  # what is given beats what was measured


@pytest.mark.parametrize("sparse", [0, 5], ids=["dense-alone", "dense-first"])
def test_dense_steps_that_come_first_tell_nothing_of_the_sparse_ones(tmp_path: Path, sparse: int) -> None:
    path = write_run(tmp_path / "m.jsonl", 2, laps=True)
    config, *steps = [json.loads(line) for line in path.read_text().splitlines()]
    for step in steps:
        dense = step["step"] < 40 - sparse
        step |= {"scape/sparsity": 0.0, "scape/ms_update": 9.0} if dense else {"scape/sparsity": 0.99}
    path.write_text("\n".join(map(json.dumps, [config, *steps])) + "\n")
    found = read_run(path)
    assert found["compute_ms"] in (20.0, 28.0) and found.get("scape_local_ms") == (3.0 if sparse else None)


def test_a_run_on_one_rank_is_all_compute(tmp_path: Path) -> None:
    assert read_run(write_run(tmp_path / "m.jsonl", 1, laps=False))["compute_ms"] == 40.0


def test_a_dense_run_on_several_ranks_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path / "m.jsonl", 2, laps=False)
    with pytest.raises(ValueError, match="on 2 ranks without SCAPE's times"):
        read_run(path)
    assert read_run(path, compute_given=True) == {"params": 470_528, "dtype": "bf16"}


@pytest.mark.parametrize("text", ["", "{}\n", "not json\n", '{"kind": "step", "step_ms": 3, "step": 1}\n'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.jsonl").write_text(text)
    with pytest.raises(ValueError, match="--from-run"):
        read_run(tmp_path / "m.jsonl")


def test_defaults_are_checked_too() -> None:
    options = checked({"params": "7B", "nodes": "2", "bandwidth": "10Gbit", "compute_ms": "100"})
    assert options.cluster().ranks == 2 and options.workload().compute == 0.1


def test_it_starts_without_torch_and_deepspeed() -> None:
    code = (
        "import sys, runpy; sys.orig_argv = ['python', '-m', 'deepspeed_scape.plan'];"
        "sys.modules['torch'] = sys.modules['deepspeed'] = None;"  # importing them fails
        f"sys.argv = ['plan', *{BASE!r}, '--json']; runpy.run_module('deepspeed_scape.plan', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 32


@pytest.mark.parametrize("missing", ["rich", "pydantic"])
def test_a_bare_python_is_told_what_to_install(missing: str) -> None:
    """And all of it at once, as docs/planner.md and setup.cfg have it."""
    code = (
        "import sys, runpy; sys.orig_argv = ['python', '-m', 'deepspeed_scape.plan'];"
        f"sys.modules[{missing!r}] = None; runpy.run_module('deepspeed_scape.plan', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said, _, remedy = done.stderr.strip().partition(f" has no {missing}. Remedy: ")
    assert done.returncode == 1 and said.startswith("deepspeed_scape.plan: ")
    assert f"\n    {remedy}\n" in (ROOT / "docs" / "planner.md").read_text()
    ranges = re.findall(r"'(.*?)'", remedy)
    assert len(ranges) == 2 and all(f"\n    {entry}\n" in (ROOT / "setup.cfg").read_text() for entry in ranges)
