"""What the slow proofs make of their samples and reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals import compatibility
from evals.compatibility import node_id, read_junit, run_failed
from evals.long_run import Sample, complaints, growth, thinned

MIB = 1 << 20


def line(rss_per_step: float = 0.0, fds_at_end: int = 0, steps: int = 1000) -> list[Sample]:
    """Samples of a rank that starts at 100 MiB and holds 20 descriptors and 8 threads."""
    return [
        Sample(step, 100 * MIB + int(rss_per_step * step), 20 + (fds_at_end if step > 0.7 * steps else 0), 8)
        for step in range(0, steps + 1, 10)
    ]


def test_a_flat_run_is_not_complained_of() -> None:
    grown = growth(line(), 1000)
    assert grown["rss_grown"] == grown["fds_grown"] == grown["threads_grown"] == 0
    assert grown["rss_before"] == 100 * MIB and grown["fds_before"] == 20
    assert complaints([grown, grown], [5.0, 4.0, 4.02]) == []


def test_what_grows_or_drifts_is_named() -> None:
    flat, leak, open_files = growth(line(), 1000), growth(line(20_000), 1000), growth(line(fds_at_end=1), 1000)
    assert complaints([flat, leak, open_files], [5.0, 4.0, 4.1]) == [
        "rank 1 holds 11.5 MiB more at the end",
        "rank 2 holds 1 fds more",
        "the validation loss ends at 4.1000, its best was 4.0000",
    ]


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="more --steps"):
        growth(line()[:5], 1000)


@pytest.mark.parametrize("count", [1, 39, 40, 41, 500])
def test_thinned_keeps_few_in_order(count: int) -> None:
    kept = [sample["step"] for sample in thinned([Sample(step, 1, 1, 1) for step in range(count)])]
    assert kept == sorted(set(kept)) and kept[0] == 0 and min(count, 20) <= len(kept) <= 40


def test_a_report_of_pytest_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="a" name="x"/>'
        '<testcase classname="a" name="y"><skipped/></testcase>'
        '<testcase classname="b" name="z[1]"><failure>no</failure></testcase><testcase classname="b" name="w"><error/>'
        "</testcase></testsuite></testsuites>"
    )
    assert read_junit(path) == {"passed": 1, "skipped": 1, "failed": ["b::z[1]", "b::w"]}


def test_what_failed_is_run_again_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_id("tests.dist.test_wire::test_a[W2-x.y]") == "tests/dist/test_wire.py::test_a[W2-x.y]"
    asked = []

    def run_tests(pair: str, folder: Path, arguments: list[str]) -> dict[str, object]:
        asked.extend(arguments)
        return {"passed": 1, "skipped": 0, "failed": ["tests.b::w"]}

    monkeypatch.setattr(compatibility, "run_tests", run_tests)
    known = {"1/2": {"passed": 5, "failed": ["tests.a::z[1]", "tests.b::w"]}}
    result = run_failed(known, "1/2", tmp_path)
    assert asked == ["tests/a.py::z[1]", "tests/b.py::w"]
    assert result["passed"] == 5 and result["failed"] == known["1/2"]["failed"]
    assert result["passed_again"] == ["tests.a::z[1]"]
