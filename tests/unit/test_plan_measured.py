"""The planner against what `python -m evals.network` measured: within 15%.

All rows of the older table (commit c9adb6a) are. Of the one that the README shows two of 112 are not, which is told in
evals/README.md: among them are steps of 5 s, measured once.
"""

from __future__ import annotations

import pytest

from evals.network.__main__ import RESULTS
from evals.network.methods import METHODS
from evals.network.predict import NOT_MODELLED, Check, check_all
from evals.network.report import read_table

TABLES = {name: read_table(RESULTS / f"{name}.csv")[0] for name in ("network", "network_older")}
CHECKS = {name: check_all(table) for name, table in TABLES.items()}
MISSED = {("zero2", (2, 100.0)), ("zero2-bf16", (4, 1000.0))}  # by 1 and 3 points


@pytest.mark.parametrize("name", TABLES)
def test_every_measured_row_is_checked(name: str) -> None:
    settings = set(TABLES[name].settings)
    assert settings == {(hosts, mbit) for hosts in (2, 4) for mbit in (None, 1000.0, 200.0, 100.0)}
    methods = set(METHODS) - set(NOT_MODELLED)
    assert {(check.setting, check.method) for check in CHECKS[name]} == {(s, m) for s in settings for m in methods}


@pytest.mark.parametrize(
    "check", CHECKS["network_older"], ids=lambda c: f"{c.setting[0]}-hosts-{c.setting[1]}-{c.method}"
)
def test_prediction_is_within_15_percent(check: Check) -> None:
    assert abs(check.error) <= 0.15, f"predicted {check.predicted:.0f} ms, measured {check.measured:.0f} ms"


def test_of_the_shown_table_two_rows_are_not() -> None:
    far = {(check.method, check.setting): check.error for check in CHECKS["network"] if abs(check.error) > 0.15}
    assert set(far) == MISSED and max(map(abs, far.values())) < 0.18
