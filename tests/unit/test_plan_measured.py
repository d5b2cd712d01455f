"""The planner against evals/results/network.csv: within 15% on every row, by `python -m evals.network`."""

from __future__ import annotations

import pytest

from evals.network.__main__ import RESULTS
from evals.network.methods import METHODS
from evals.network.predict import NOT_MODELLED, Check, check_all
from evals.network.report import Table, read_table

MEASURED = RESULTS / "network.csv"
pytestmark = pytest.mark.skipif(not MEASURED.exists(), reason="not measured yet: sudo python -m evals.network")
TABLE = read_table(MEASURED)[0] if MEASURED.exists() else Table([])
CHECKS = check_all(TABLE)


def test_every_measured_row_is_checked() -> None:
    assert {(2, mbit) for mbit in (None, 1000.0, 200.0, 100.0)} <= set(TABLE.settings)
    methods = set(METHODS) - set(NOT_MODELLED)
    assert {(check.setting, check.method) for check in CHECKS} == {(s, m) for s in TABLE.settings for m in methods}


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: f"{c.setting[0]}-hosts-{c.setting[1]}-{c.method}")
def test_prediction_is_within_15_percent(check: Check) -> None:
    assert abs(check.error) <= 0.15, f"predicted {check.predicted:.0f} ms, measured {check.measured:.0f} ms"
