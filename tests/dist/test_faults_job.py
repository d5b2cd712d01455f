"""Faults in the real job under the real launcher (``evals/faults.py`` has them all, at 2 and 4 ranks)."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals import faults

pytestmark = [pytest.mark.dist, pytest.mark.slow]  # minutes; CI has the parts it is made of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[int, float]:
    return faults.undisturbed(folder, 2)


@pytest.mark.parametrize("kind", ["stopped", "killed while saving"])
def test_a_fault_ends_the_job_and_a_resume_loses_nothing(folder: Path, whole: dict[int, float], kind: str) -> None:
    result = faults.try_fault(folder, 2, kind, whole)
    assert faults.holds(result), result
