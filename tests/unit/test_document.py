"""The JSON judged before DeepSpeed sees it, and DeepSpeed's own complaints in our form."""

from __future__ import annotations

import inspect
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_scape import ScapeConfigError, document, initialize
from tests.dist import fuzz_configs

GOOD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "SCAPE", "params": {"lr": 1e-3}},
}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "typo": ({"gradient_cliping": 1.0}, "gradient_cliping = 1.0: DeepSpeed knows no such key"),
    "british": ({"zero_optimisation": {}}, "zero_optimisation = {}: DeepSpeed knows no such key"),
    "typo beside": ({"gradient_cliping": 1.0, "gradient_clipping": 1.0}, "gradient_cliping = 1.0: DeepSpeed knows no"),
    "option outside": ({"sparsity": 0.9}, "sparsity = 0.9: an option of SCAPE, which DeepSpeed ignores here"),
    "section of ours": ({"Scape": {"sparsity": 0.9}}, "Scape = {'sparsity': 0.9}: DeepSpeed ignores such a section"),
    "section": ({"fp16": True}, "fp16 = True: must be a JSON object"),
    "flag": ({"wall_clock_breakdown": "yes"}, "wall_clock_breakdown = 'yes': must be true or false"),
    "zero batch": ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu = 0: must be a whole number"),
    "text batch": ({"train_batch_size": "8"}, "train_batch_size = '8'"),
    "no batch": ({"train_micro_batch_size_per_gpu": None}, "neither it nor train_batch_size is given"),
    "one rank's batch": ({"train_batch_size": 4}, "train_batch_size = 4: does not go with 4 a rank"),
    "batch mismatch": ({"train_batch_size": 7}, "train_batch_size = 7: does not go with 4 a rank"),
    "all three": ({"train_batch_size": 16, "gradient_accumulation_steps": 3}, "train_batch_size = 16: does not go"),
    "a multiple": ({"train_batch_size": 16, "gradient_accumulation_steps": 1}, "train_batch_size = 16: does not go"),
    "clip": ({"gradient_clipping": "1.0"}, "gradient_clipping = '1.0'"),
    "negative clip": ({"gradient_clipping": -1}, "gradient_clipping = -1"),
    "print": ({"steps_per_print": 0}, "steps_per_print = 0"),
    "both": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled = True: bf16.enabled is true"),
    "scale": ({"fp16": {"enabled": True, "initial_scale_power": 2000}}, "fp16.initial_scale_power = 2000"),
    "accum": ({"data_types": {"grad_accum_dtype": "int8"}}, "data_types.grad_accum_dtype = 'int8'"),
    "accum name": ({"data_types": {"grad_accum": "fp32"}}, "data_types.grad_accum = 'fp32': DeepSpeed would ignore it"),
    "scheduler": ({"scheduler": {"type": "Nope"}}, "scheduler.type = 'Nope'"),
    "torch's": ({"scheduler": {"type": "StepLR"}}, "pass lr_scheduler=FUNCTION"),
    "scheduler name": ({"scheduler": {"type": "WarmupLR", "params": {"steps": 1}}}, "scheduler.params.steps = 1"),
    "scheduler lacks": ({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5}}},
                        "scheduler.params.total_num_steps = None: WarmupDecayLR needs it"),
    "scheduler end": ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 50}}},
                      "scheduler.params.total_num_steps = 50: the schedule ends before its warm-up of 1000 steps"),
    "cosine end": ({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 5, "warmup_num_steps": 6}}},
                   "scheduler.params.total_num_steps = 5: the schedule ends before its warm-up of 6 steps"),
    "scheduler value": ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "x"}}}, "scheduler.params"),
    "optimizer": ({"optimizer": "SCAPE"}, "optimizer = 'SCAPE': must be a JSON object"),
    "spelling": ({"optimizer": {"type": "ADAMS"}}, "optimizer.type = 'ADAMS': no optimizer of that name"),
    "slip": ({"optimizer": {"type": "SCPAE", "params": {"lr": 1e-3}}}, "optimizer.type = 'SCPAE': no optimizer"),
    "list": ({"optimizer": {"type": ["SCAPE"]}}, "optimizer.type = ['SCAPE']"),
    "param": ({"optimizer": {"type": "SCAPE", "param": {}}}, "optimizer.param = {}: DeepSpeed would ignore it"),
    "sequence": ({"sequence_parallel_size": 0}, "sequence_parallel_size = 0"),
    "auto count": ({"gradient_accumulation_steps": "auto"}, "gradient_accumulation_steps = 'auto': nobody has filled"),
    "auto dtype": ({"bf16": {"enabled": "auto"}}, "bf16.enabled = 'auto'"),
    "auto schedule": ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}},
                      "scheduler.params.warmup_max_lr = 'auto'"),
    "auto stage": ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage = 'auto'"),
    "auto offload": ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "auto"}}},
                     "zero_optimization.offload_optimizer.device = 'auto'"),
    "alias": ({"max_grad_norm": 1.0}, "max_grad_norm = 1.0: DeepSpeed knows no such key and would ignore it. Remedy: "
              "write gradient_clipping"),
    "cut short": ({"train_micro_batch_size": 4}, "Remedy: write train_micro_batch_size_per_gpu"),
    "plural": ({"optimizers": {}}, "optimizers = {}: DeepSpeed knows no such key"),
    "unchecked name": ({"checkpoint": {"load_univrsal": True}}, "checkpoint.load_univrsal = True: DeepSpeed knows no"),
    "unchecked flag": ({"flops_profiler": {"enabled": "x"}}, "flops_profiler.enabled = 'x': must be true or false"),
    "stage": ({"zero_optimization": {"stage": "two"}}, "zero_optimization.stage = 'two': ZeRO has no such stage"),
    "big stage": ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4: ZeRO has no such stage"),
    "no schedule": ({"scheduler": {"params": {}}}, "scheduler.type = None: DeepSpeed would train without a schedule"),
    "scheduler number": ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1,
                                                                      "decay_lr_rate": "x"}}},
                         "scheduler.params.decay_lr_rate = 'x': must be a number"),
    "Type": ({"optimizer": {"Type": "SCAPE"}}, "optimizer.Type = 'SCAPE': DeepSpeed would ignore it. Remedy: write"),
    "no type": ({"optimizer": {"params": {"lr": 1e-3}}}, "optimizer.type = None: no optimizer of that name"),
    "tensor": ({"tensor_parallel": {"autotp_size": "x"}}, "tensor_parallel.autotp_size = 'x'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_documents_are_refused_by_key(name: str) -> None:
    change, said = BAD[name]
    assert document.is_ours({**GOOD, **change})
    with pytest.raises(ScapeConfigError) as error:
        document.check({**GOOD, **change}, 2)
    assert said in str(error.value) and "Remedy: " in str(error.value)


def test_modules_of_monitors_are_looked_for() -> None:
    asked = {**GOOD, "comet": {"enabled": True}, "csv_monitor": {"enabled": True}, "wandb": {"enabled": False}}
    document.check(asked, 2)  # which is the same on every rank; modules need not be
    (refusal,) = document.missing_monitors(asked)
    assert refusal[:3] == ("comet.enabled", True, "comet_ml is not installed")


def test_a_refusal_is_told_without_the_way_through_deepspeed() -> None:
    """Every rank prints its traceback: the script's own line, and ours."""
    with pytest.raises(ScapeConfigError) as error:
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config={**GOOD, "gradient_clipping": -1})
    assert len(error.traceback) == 2 and error.value.__suppress_context__


def test_all_mistakes_are_told_at_once_each_key_once() -> None:
    change = {"gradient_clipping": -1, "train_batch_size": 7, "sequence_parallel_size": 0, "fp16": {"enabled": "auto"}}
    with pytest.raises(ScapeConfigError) as error:
        document.check({**GOOD, **change}, 2)
    assert error.value.key == "fp16.enabled" and str(error.value).count("Remedy: ") == 4  # form comes before values
    with pytest.raises(ScapeConfigError) as error:
        document.check({**GOOD, **change, "fp16": {}}, 2)
    told = [line.split(" = ")[0] for line in str(error.value).split("\n")]
    assert told == ["gradient_clipping", "sequence_parallel_size", "train_batch_size"]
    assert str(error.value).count("Remedy: ") == 3
    with pytest.raises(ScapeConfigError) as error:
        document.check({**GOOD, "fp16": "auto"}, 2)
    assert str(error.value).count("Remedy: ") == 1


def test_a_batch_is_not_judged_without_a_number_of_ranks() -> None:
    document.check({**GOOD, "train_batch_size": 7}, None)
    with pytest.raises(ScapeConfigError):
        document.check({**GOOD, "train_batch_size": 0}, None)


def test_what_a_trainer_will_fill_in_is_left_to_it() -> None:
    auto = json.loads(Path("launch/examples/scape_auto.json").read_text())
    known, left = document.without_autos(auto)
    assert "optimizer.params.lr" in left and "auto" not in json.dumps(known)
    document.check(known, 2)
    other = {
        **GOOD,
        "zero_optimization": {"stage": "auto"},
        "train_batch_size": 8,
        "gradient_accumulation_steps": "auto",
    }
    known, left = document.without_autos(other)
    assert left == ["gradient_accumulation_steps"] and known == {**GOOD, "zero_optimization": {"stage": "auto"}}
    assert other["gradient_accumulation_steps"] == "auto"


class _Counted:
    """Accelerate as it is after somebody has asked it."""

    def __init__(self, processes: int) -> None:
        self._shared_state, self.num_processes = {"num_processes": processes}, processes

    def __call__(self) -> _Counted:
        return self


@pytest.mark.parametrize(("counted", "started"), [(1, 2), (2, 2), (None, 2), (1, 1)])
def test_an_accelerate_that_counts_other_ranks_is_refused(
    counted: int | None, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerate = types.SimpleNamespace(PartialState=_Counted(counted or 0))
    if counted is None:
        accelerate.PartialState._shared_state = {}
    monkeypatch.setitem(sys.modules, "accelerate", accelerate)
    monkeypatch.setenv("WORLD_SIZE", str(started))
    if counted in (None, started):
        initialize._check_accelerate()
        return
    with pytest.raises(ScapeConfigError, match=r"num_processes = 1: 2 ranks .* Remedy: on CPUs .* --use_cpu"):
        initialize.guarded(lambda config: None, inspect.signature(lambda config: None).bind(config=GOOD))


@pytest.mark.parametrize(
    ("key", "filler"),
    [
        ("lr", "the Hugging Face Trainer or Accelerate"),
        ("betas", "only the Hugging Face Trainer"),
        ("sparsity", "nothing"),
    ],
)
def test_an_auto_that_nobody_filled_says_who_would_have(key: str, filler: str) -> None:
    with pytest.raises(ScapeConfigError) as error:
        document.check({**GOOD, "optimizer": {"type": "SCAPE", "params": {key: "auto"}}}, 2)
    assert error.value.key == f"optimizer.params.{key}" and filler in error.value.remedy


@pytest.mark.parametrize("path", sorted(Path("ds_configs").glob("*scape*.json")), ids=lambda path: path.stem)
def test_shipped_documents_pass(path: Path) -> None:
    document.check(json.loads(path.read_text()), 2)


@pytest.mark.parametrize(
    "change",
    [{}, {"train_batch_size": 8}, {"train_batch_size": 24, "gradient_accumulation_steps": 3}, {"my_own_notes": "hello"},
     {"gradient_clipping": 1.0, "_gradient_clipping": 0.5, "seed": 3},
     {"steps_per_print": None}, {"steps_per_print": math.inf}, {"gradient_clipping": 0},
     {"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": "auto"}},
     {"wandb": {"enabled": False, "group": "auto"}},
     {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 50, "warmup_num_steps": 50}}},
     {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}}}],
    ids=str,
)  # fmt: skip
def test_good_documents_pass(change: dict[str, Any]) -> None:
    document.check({**GOOD, **change}, 2)


@pytest.mark.parametrize(
    "optimizer",
    [{"type": "AdamW", "params": {"lr": 1}}, None]
    + [
        {"type": name} for name in ("Lamb", "Adam", "Muon", "Lion", "OneBitAdam", "SGD", "Adamax", "SparseAdam", "ASGD")
    ],
)
def test_other_peoples_documents_are_left_alone(optimizer: Any) -> None:
    assert not document.is_ours({**GOOD, "optimizer": optimizer, "fp16": True})


@given(number=st.integers(0, 2**32))
def test_nothing_but_our_error_comes_out(number: int) -> None:
    settings = fuzz_configs.build(number)
    if document.is_ours(settings):
        try:
            document.check(settings, 2)
        except ScapeConfigError as error:
            assert error.key and error.remedy


def test_a_file_is_read_and_anything_else_is_deepspeeds(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("# with a comment, as hjson may\n" + json.dumps(GOOD))
    assert document.read(str(path)) == GOOD
    for other in (None, "eyJhIjogMX0=", str(tmp_path / "none.json"), 3):
        assert document.read(other) is None


def test_errors_of_the_users_own_code_pass() -> None:
    try:
        raise AssertionError("my model wants zero_optimization")
    except AssertionError as error:
        assert initialize.rephrase(error, GOOD) is None


@pytest.mark.parametrize(
    ("text", "said"), [("{", "it is not JSON: "), ("[1]", "it holds no JSON object"), ("{}", None)]
)
def test_a_file_that_cannot_be_read_is_told_by_its_fault(text: str, said: str | None, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    found = document.fault(str(path))
    assert (found is None) == (said is None) and (said is None or (found or "").startswith(said))
    assert document.fault({}) is None


def test_a_file_that_is_not_json_is_refused_before_deepspeed_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("{")

    def stock(config: Any = None) -> None:
        raise AssertionError("DeepSpeed was asked")

    with pytest.raises(ScapeConfigError, match="ds.json': it is not JSON: .*Remedy: correct that file"):
        initialize.guarded(stock, inspect.signature(stock).bind(config=str(path)))


def test_a_process_without_a_rank_is_told_how_to_get_one() -> None:
    def stock(config: Any) -> None:
        raise ModuleNotFoundError("No module named 'mpi4py'", name="mpi4py")

    with pytest.raises(ScapeConfigError, match=r"^RANK = None: nobody has given .* start it with deepspeed") as error:
        initialize.guarded(stock, inspect.signature(stock).bind(config=GOOD))
    assert error.value.__suppress_context__


def test_a_missing_or_empty_file_is_told(tmp_path: Path) -> None:
    stock = inspect.signature(lambda config: None)
    for name, said in (("none.json", "there is no such file"), ("empty.json", "it is not JSON: the file is empty")):
        (tmp_path / "empty.json").write_text(" \n")
        with pytest.raises(ScapeConfigError, match=said):
            initialize.guarded(lambda config: None, stock.bind(config=str(tmp_path / name)))
    assert document.fault("eyJhIjogMX0=") is None  # DeepSpeed takes a document in base64


def test_what_else_is_wrong_is_told_with_the_first() -> None:
    params = {"sparcity": 0.9, "lr": "5e-4", "ballots": "true"}
    bad = {**GOOD, "gradient_clipping": -1, "zero_optimization": {"stage": 3}}
    with pytest.raises(ScapeConfigError) as error:
        initialize.check({**bad, "optimizer": {"type": "SCAPE", "params": params}}, 2)
    remedies = {key: remedy for key, _, _, remedy in error.value.refusals}
    assert list(remedies)[0] == "gradient_clipping" and "zero_optimization.stage" in remedies
    assert remedies["optimizer.params.sparcity"] == "write sparsity"
    assert remedies["optimizer.params.ballots"] == "write true without quotes"
    assert len(remedies) == 5
    initialize.check({**bad, "gradient_clipping": 1.0}, 2)  # left to the engine, which knows what DeepSpeed makes of it


@pytest.mark.parametrize("zero", ["x", {"stag": 2}, {"stage": None}, {"stage": "x"}])
def test_a_stage_that_is_refused_is_not_refused_again_as_deepspeeds_default(zero: Any) -> None:
    bad = {**GOOD, "zero_optimization": zero, "gradient_clipping": -1}
    with pytest.raises(ScapeConfigError) as error:
        initialize.check(bad, 2)
    assert len([key for key, *_ in error.value.refusals if key.startswith("zero_optimization")]) == 1


def test_values_are_told_as_the_file_has_them(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    written = {**GOOD, "optimizer": {"type": "SCAPE", "params": {"sparsity": 1.0}}, "gradient_clipping": -2.0}
    path.write_text(json.dumps(written))
    stock = inspect.signature(lambda config: None)
    with pytest.raises(ScapeConfigError, match=r"gradient_clipping = -2\.0: (.|\n)*params\.sparsity = 1\.0: "):
        initialize.guarded(lambda config: None, stock.bind(config=str(path)))
    whole = {"lr": 1.0, "selection": "block", "block_size": 150}
    path.write_text(json.dumps({**GOOD, "optimizer": {"type": "SCAPE", "params": whole}, "fp16": 1}))
    with pytest.raises(ScapeConfigError, match=r"params = {'block_size': 150}: "):  # of which only a part is at fault
        initialize.guarded(lambda config: None, stock.bind(config=str(path)))
    path.write_text("# hjson\n" + json.dumps(written))
    with pytest.raises(ScapeConfigError, match="gradient_clipping = -2: "):
        initialize.guarded(lambda config: None, stock.bind(config=str(path)))


def test_what_is_put_aside_or_somebody_elses_is_left_alone() -> None:
    aside = {
        "_optimizer": {},
        "optimizer-old": {},
        "#fp16": {},
        "fp16": {},
        "train_steps": 9,
        "checkpoint_dir": "x",
        "lr": 1e-3,
    }
    document.check({**GOOD, **aside, "gradient_clipping": 1.0, "max_grad_norm": 1.0}, 2)
    document.check({**GOOD, "checkpoint": {"parallel_write": {}, "something_new": 1}, "scheduler": {}}, 2)
    script_has_one = {**GOOD, "optimizer": {"params": {"lr": 1e-3}}}
    assert not document.is_ours(script_has_one, torch.optim.AdamW([torch.zeros(1, requires_grad=True)]))


def test_a_misspelt_optimizer_section_is_ours_if_it_asks_for_us() -> None:
    ours = {name: value for name, value in GOOD.items() if name != "optimizer"}
    assert not document.is_ours(ours) and not document.is_ours({**ours, "optimiser": {"type": "Adam"}})
    assert document.is_ours({**ours, "optimiser": GOOD["optimizer"]})
    with pytest.raises(ScapeConfigError, match="optimiser = .*Remedy: write optimizer"):
        document.check({**ours, "optimiser": GOOD["optimizer"]}, 2)


def test_keys_that_stand_twice_are_told_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    text = (
        json.dumps(GOOD)
        .replace('"lr": 0.001', '"lr": 0.001, "lr": 0.002')
        .replace('"stage": 2', '"stage": 1, "stage": 2')
    )
    path.write_text(text)
    found = document.read(str(path))
    assert found == {**GOOD, "optimizer": {"type": "SCAPE", "params": {"lr": 0.002}}}
    with pytest.raises(ScapeConfigError) as error:
        document.check(document.without_autos(found)[0], 2)
    keys = [(key, value) for key, value, *_ in error.value.refusals]
    assert keys == [("zero_optimization.stage", 2), ("optimizer.params.lr", 0.002)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1e999}', "it holds a number that is too large"),
        ('{"a": Infinity}', "Infinity is no number of JSON"),
        ("{'a': True}", "Expecting property name enclosed in double quotes: line 1 column 2"),
        ('{"a": {"b": 1}', "Expecting ',' delimiter: line 1 column 15"),
        ('# mine\n{"a": {"b": 1}', "Bad key name"),
    ],
)
def test_a_slip_in_the_json_is_told_where_it_is(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert document.read(str(path)) is None and said in (document.fault(str(path)) or "")


def test_an_empty_generator_of_parameters_is_told() -> None:
    def stock(config: Any) -> None:
        torch.optim.AdamW([])

    with pytest.raises(ScapeConfigError, match="model_parameters = 'empty': .*generator can be read only once"):
        initialize.guarded(stock, inspect.signature(stock).bind(config=GOOD))


def test_a_batch_of_which_a_part_is_unknown_is_not_judged() -> None:
    with pytest.raises(ScapeConfigError) as error:
        document.check({**GOOD, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": 7, "fp16": 1}, 2)
    assert [key for key, *_ in error.value.refusals] == ["train_micro_batch_size_per_gpu", "fp16"]


def test_a_stage_that_nobody_has_written_is_told_as_such() -> None:
    bad = {"train_micro_batch_size_per_gpu": 4, "optimizer": GOOD["optimizer"], "fp16": 1}
    for zero, told in (({}, None), ({"zero_optimization": {"stage": 0}}, 0)):
        with pytest.raises(ScapeConfigError) as error:
            initialize.check({**bad, **zero}, 2)
        assert ("zero_optimization.stage", told) in [refusal[:2] for refusal in error.value.refusals]
