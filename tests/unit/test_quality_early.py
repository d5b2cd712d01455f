"""The first steps by dense steps and warm-up of the rate: what is run, and the table. No run is made here."""

from __future__ import annotations

from evals.quality.early import LAST, LR_WARMUPS, STEPS, cells, table


def test_every_cell_is_another_run_and_none_is_of_a_seed_that_tunes() -> None:
    found = cells()
    assert len({(warm_up, spec.name) for _, warm_up, spec in found}) == len(found) == 8 * len(LR_WARMUPS)
    assert {spec.seed for *_, spec in found} == {1} and LAST < STEPS < min(spec.steps for *_, spec in found)
    for title, _, spec in found:
        assert ("dense steps first" in title) == ("scape" in spec.config) and f"lr {spec.lr:g}" in title
        if "scape" in spec.config:
            assert f", {spec.overrides['warmup_steps']} dense steps first" in title
            assert f"SCAPE {round(100 * (1 - spec.density))}%" in title


def test_table_has_a_column_for_each_warm_up() -> None:
    lines = table({"a": dict.fromkeys(LR_WARMUPS, 3.0), "b": {n: n / 1000 for n in LR_WARMUPS}})
    assert lines[0].count("steps") == len(LR_WARMUPS) and lines[2] == "| a | 3.000 | 3.000 | 3.000 | 3.000 |"
    assert lines[3] == "| b | 0.010 | 0.100 | 0.400 | 1.000 |"
