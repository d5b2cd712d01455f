"""The sweep's bookkeeping: names of runs, the grid of rates, what remains, tables. No run is made here."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from deepspeed_scape.config import ScapeOptions
from evals.quality import __main__ as command
from evals.quality import table
from evals.quality.groups import GROUPS, SCAPE99, SEEDS, TUNING_SEED, UNSEEN_SEEDS, rate
from evals.quality.results import Results
from evals.quality.spec import RunSpec
from launch.settings import resolve_config


def finish(folder: Path, spec: RunSpec, loss: float, diverged: bool = False) -> None:
    result = {
        "spec": spec.model_dump(),
        "diverged": diverged,
        "tuning_loss": loss,
        "val_loss": loss,
        "step_ms": 50.0,
        "data_key": "a text",
    }
    result |= {"visits": {"never": 0.25}, "bytes_per_step": 1000.0}
    (folder / f"{spec.name}.json").write_text(json.dumps(result))


def tuned(folder: Path, losses: dict[int, float]) -> None:
    for place, loss in losses.items():
        finish(folder, SCAPE99.run(rate(5e-4, place), TUNING_SEED), loss, math.isinf(loss))


def test_every_run_of_every_group_has_a_configuration_and_one_name() -> None:
    names: dict[str, Any] = {}
    for entry in (entry for entries in GROUPS.values() for entry in entries):
        spec = entry.run(1e-3, 1)
        settings = spec.settings()
        assert (
            settings["optimizer"]["params"]["lr"] == 1e-3
            and settings["train_micro_batch_size_per_gpu"] == spec.micro_batch
        )
        decisive = spec.model_dump(exclude={"method"})
        assert names.setdefault(spec.name, decisive) == decisive
        assert 0 < spec.density <= 1
    twice = len(GROUPS["seen"]) + 2  # as main; and 100 dense steps are the default, in warm-up and in main
    assert len(names) == sum(map(len, GROUPS.values())) - twice


def test_tuning_reads_no_seed_that_the_table_reports() -> None:
    assert TUNING_SEED not in SEEDS and len(set(SEEDS)) == 3


def test_the_claim_rests_on_seeds_by_which_nothing_was_chosen() -> None:
    assert not {TUNING_SEED, *SEEDS} & set(UNSEEN_SEEDS) and len(set(UNSEEN_SEEDS)) == 3
    assert {entry.seeds for entry in GROUPS["main"]} == {UNSEEN_SEEDS}
    assert {entry.seeds for name, entries in GROUPS.items() if name != "main" for entry in entries} == {SEEDS}
    for ours, seen in zip(GROUPS["main"], GROUPS["seen"], strict=True):
        assert ours.run(1e-3, 1) == seen.run(1e-3, 1)  # so the rate of one is the rate of the other


def test_groups_that_compare_ranks_have_one_total_batch() -> None:
    for entry in GROUPS["world"] + GROUPS["ballots"]:
        assert entry.setting.world * entry.setting.micro_batch == 16


def test_a_name_changes_with_everything_that_decides_the_outcome() -> None:
    base = SCAPE99.run(5e-4, 1)
    changes = {"rule": "no residual", "overrides": {"ballots": True}, "preset": "tiny", "seq": 32, "world": 4,
               "micro_batch": 1, "steps": 10, "lr": 6e-4, "seed": 2, "config": "zero2_scape90_fp32"}  # fmt: skip
    names = {base.model_copy(update={key: value}).name for key, value in changes.items()} | {base.name}
    assert len(names) == len(changes) + 1
    assert base.model_copy(update={"method": "another label"}).name == base.name


@pytest.mark.parametrize(("key", "value"), [("rule", "nonsense"), ("preset", "nonsense"), ("steppes", 1)])
def test_a_bad_spec_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=key if key == "steppes" else "nonsense"):
        RunSpec(**{**SCAPE99.run(5e-4, 1).model_dump(), key: value})


@pytest.mark.parametrize(
    ("losses", "asked", "best"),
    [
        ({}, [-1, 0, 1], None),
        ({-1: 3.1, 0: 3.0}, [-1, 0, 1], None),
        ({-1: 3.1, 0: 3.0, 1: 3.2}, [-1, 0, 1], 0),
        ({-1: 3.1, 0: 3.0, 1: 2.9}, [-1, 0, 1, 2], None),
        ({-1: 3.1, 0: 3.0, 1: 2.9, 2: math.inf}, [-1, 0, 1, 2], 1),  # a diverged run is a bad one
        ({-1: 2.8, 0: 3.0, 1: 2.9}, [-2, -1, 0, 1], None),
        ({place: 3.0 - 0.1 * place for place in range(-1, 8)}, list(range(-1, 8)), 7),  # not for ever
    ],
)
def test_the_grid_goes_on_to_the_side_of_the_best(
    tmp_path: Path, losses: dict[int, float], asked: list[int], best: int | None
) -> None:
    tuned(tmp_path, losses)
    results = Results(tmp_path)
    assert list(results.tuning(SCAPE99)) == [rate(5e-4, place) for place in asked]
    assert results.chosen_rate(SCAPE99) == (None if best is None else rate(5e-4, best))
    missing = [spec.lr for spec in results.remaining(SCAPE99)]
    if best is None:
        assert missing == [rate(5e-4, place) for place in asked if place not in losses]
    else:
        assert missing == [rate(5e-4, best)] * 3


def test_an_entry_at_anothers_rate_waits_for_it_and_then_runs_the_seeds(tmp_path: Path) -> None:
    change = next(entry for entry in GROUPS["ablations"] if entry.rule == "no residual")
    assert [spec.name for spec in Results(tmp_path).remaining(change)] == [
        spec.name for spec in Results(tmp_path).remaining(SCAPE99)
    ]
    tuned(tmp_path, {-1: 3.1, 0: 3.0, 1: 3.2})
    plain = replace(change, far=math.inf)
    left = list(Results(tmp_path).remaining(plain))
    assert [(spec.lr, spec.seed) for spec in left] == [(5e-4, seed) for seed in SEEDS]
    finish(tmp_path, left[1], 3.3)
    assert [spec.seed for spec in Results(tmp_path).remaining(plain)] == [1, 3]
    assert [(spec.lr, spec.seed) for spec in Results(tmp_path).remaining(change)] == [(5e-4, 1)]
    further = replace(plain, rate_of=change)  # a change of a change has the rate of what was tuned
    assert further.tuned is SCAPE99 and [s.lr for s in Results(tmp_path).remaining(further)] == [5e-4, 5e-4]


@pytest.mark.parametrize(
    ("group", "loss", "seeds"),
    [
        *[("ablations", loss, seeds) for loss, seeds in ((3.101, []), (3.099, [2, 3]), (2.5, [2, 3]))],
        *[("rule", loss, seeds) for loss, seeds in ((3.011, []), (3.009, [2, 3]), (math.inf, []))],
    ],
)
def test_a_change_that_is_plainly_behind_on_one_seed_gets_no_others(
    tmp_path: Path, group: str, loss: float, seeds: list[int]
) -> None:
    tuned(tmp_path, {-1: 3.1, 0: 3.0, 1: 3.2})
    change = next(entry for entry in GROUPS[group] if entry.rate_of is SCAPE99)
    (first,) = Results(tmp_path).remaining(change)
    finish(tmp_path, first, loss, math.isinf(loss))
    assert not list(Results(tmp_path).remaining(change))  # nothing to compare it with yet
    finish(tmp_path, SCAPE99.run(5e-4, 1), 3.0)
    assert [spec.seed for spec in Results(tmp_path).remaining(change)] == seeds
    if seeds == [] and math.isfinite(loss):
        row = next(line for line in table.group_table(group, Results(tmp_path)) if f"| {change.name} |" in line)
        assert f"| {loss:.4f} (1) | +{loss - 3:.4f} (" in row and "nan" not in row


def test_differences_are_paired_by_seed() -> None:
    def final(seed: int, loss: float, diverged: bool = False) -> dict[str, Any]:
        return {"spec": {"seed": seed}, "val_loss": loss, "diverged": diverged}

    ours, theirs = [final(1, 3.1), final(2, 3.2), final(3, 3.3)], [final(3, 3.2), final(2, 3.1), final(1, 3.0)]
    gap = table.difference(ours, theirs)
    assert gap is not None and gap.mean == pytest.approx(0.1) and gap.error == pytest.approx(0, abs=1e-12)
    assert gap.share == pytest.approx(0.1 / 3.1)
    assert table.difference(ours, []) is None
    assert table.difference([final(1, 0.0, diverged=True)], theirs) is None


def test_table_names_the_better_dense_method(tmp_path: Path) -> None:
    for entry, loss in zip(GROUPS["main"][:4], (3.1, 3.0, 2.9, 3.03), strict=True):
        assert entry.middle is not None
        for place in (-1, 0, 1):
            finish(tmp_path, entry.run(rate(entry.middle, place), TUNING_SEED), 3 + abs(place))
        for seed in UNSEEN_SEEDS:
            finish(tmp_path, entry.run(entry.middle, seed), loss + 0.01 * seed)
    lines = table.group_table("main", Results(tmp_path))
    assert (
        "| SCAPE 99% | 0.0005 (" in lines[5]
        and "+0.0300 ± 0.0000 (+0.98%)" in lines[5]
        and "| 79 | 25.0% |" in lines[5]
    )
    assert "+0.1000" in lines[2] and "99.9%" in lines[6] and "±" not in lines[6]
    assert all(line.count("|") == lines[0].count("|") for line in lines)


def test_groups_without_a_finished_seed_are_told_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(command, "Results", lambda: Results(tmp_path / "runs"))
    monkeypatch.setattr(command, "REPORT", tmp_path / "quality.md")
    for place, loss in {-1: 3.1, 0: 3.0, 1: 3.1}.items():
        finish(tmp_path / "runs", GROUPS["main"][0].run(rate(2e-3, place), TUNING_SEED), loss)
    command.write_tables(list(GROUPS))
    assert f"No seed finished yet: {', '.join(GROUPS)} (" in (tmp_path / "quality.md").read_text()
    finish(tmp_path / "runs", GROUPS["main"][0].run(2e-3, UNSEEN_SEEDS[0]), 3.0)
    command.write_tables(list(GROUPS))
    text = (tmp_path / "quality.md").read_text()
    assert "## main\n" in text and "## world" not in text and f"yet: {', '.join(list(GROUPS)[1:])} (" in text
    assert "| AdamW | 0.002 (" in text and "| the reference |" in text


def test_plan_counts_a_run_that_two_groups_share_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "Results", lambda: Results(tmp_path))
    alone = command.plan(["ablations"], 2)
    both = command.plan(["main", "ablations"], 2)
    assert "rates 0.000354, 0.0005, 0.000707" in next(line for line in alone if "fresh mask" in line)
    assert "waits for SCAPE 99%" in next(line for line in both if "fresh mask" in line)
    tuned(tmp_path, {-1: 3.1, 0: 3.0, 1: 3.2})
    for seed in UNSEEN_SEEDS:
        finish(tmp_path, SCAPE99.run(5e-4, seed), 3.0)
    assert any("SCAPE 99% " in line and "3/3 seeds" in line and "done" in line for line in command.plan(["main"], 2))


def test_results_of_another_text_are_found(tmp_path: Path) -> None:
    finish(tmp_path, SCAPE99.run(5e-4, 1), 3.0)
    assert Results(tmp_path).other_texts("a text") == []
    assert Results(tmp_path).other_texts("another") == [SCAPE99.run(5e-4, 1).name]


def test_settings_are_those_of_the_shipped_configuration() -> None:
    shipped = resolve_config("ds_configs/zero2_scape99_fp32.json", [], lr=5e-4, micro_batch=2)
    named = {"warmup_steps": ScapeOptions.model_fields["warmup_steps"].default}
    shipped["optimizer"]["params"] |= named  # the sweep names the default
    assert SCAPE99.run(5e-4, 1).settings() == shipped
