"""What an older DeepSpeed would take in silence: played on whichever DeepSpeed is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from deepspeed.monitor.wandb import WandbMonitor
from deepspeed.runtime import config as stock

from deepspeed_scape import ScapeConfigError, document, older

GOOD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "SCAPE", "params": {"lr": 1e-3}},
}
LATER = {
    "torch_autocast": {"torch_autocast": {"enabled": True}},
    "expert_parallel": {"expert_parallel": {"enabled": True}},
    "managed_gradient_accumulation": {"managed_gradient_accumulation": False},
    "data_types.param_dtype": {"data_types": {"param_dtype": "bf16"}},
    "data_types.buffer_dtype": {"data_types": {"buffer_dtype": "fp32"}},
    "data_types.keep_in_fp32_modules": {"data_types": {"keep_in_fp32_modules": ["norm"]}},
}
LOOSE: dict[str, dict[str, Any]] = {
    "bf16.enable": {"bf16": {"enable": True}},
    "bf16.enabled": {"bf16": {"enabled": 3}},
    "bf16.loss_scale": {"bf16": {"enabled": True, "loss_scale": 4}},
    "fp16.loss_scal": {"fp16": {"enabled": True, "loss_scal": 1}},
    "fp16.loss_scale": {"fp16": {"enabled": True, "loss_scale": -1}},
    "fp16": {"fp16": {"enabled": True, "loss_scale_window": 0}},
}


@pytest.fixture
def deepspeed_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Make the installed DeepSpeed look as if it knew the later keys, or none of them."""

    def choose(later: bool) -> None:
        for key in LATER:
            name = key.rpartition(".")[2].upper()
            if later:
                monkeypatch.setattr(stock, name, key, raising=False)
            else:
                monkeypatch.delattr(stock, name, raising=False)
        if later:
            monkeypatch.setattr(stock, "get_float16_config", None, raising=False)
        else:
            monkeypatch.delattr(stock, "get_float16_config", raising=False)

    return choose


@pytest.mark.parametrize("key", LATER)
def test_a_key_that_would_be_ignored_is_refused(deepspeed_of: Callable[[bool], None], key: str) -> None:
    deepspeed_of(False)
    with pytest.raises(ScapeConfigError, match="knows no such key and would ignore it.*a later DeepSpeed") as error:
        document.check({**GOOD, **LATER[key]}, 2)
    assert error.value.key == key
    deepspeed_of(True)
    document.check({**GOOD, **LATER[key]}, 2)


@pytest.mark.parametrize("key", LOOSE)
def test_a_slip_in_a_precision_section_is_refused(deepspeed_of: Callable[[bool], None], key: str) -> None:
    deepspeed_of(False)
    with pytest.raises(ScapeConfigError) as error:
        document.check({**GOOD, **LOOSE[key]}, 2)
    assert error.value.key == key and error.value.remedy == "correct it or remove it"
    deepspeed_of(True)
    assert not list(older.unchecked(LOOSE[key]))  # DeepSpeed's own model of the section says it


@pytest.mark.parametrize(
    "change",
    [{"torch_autocast": {"enabled": False}}, {"expert_parallel": {}}, {"managed_gradient_accumulation": True},
     {"data_types": {"grad_accum_dtype": "fp32", "param_dtype": None}}, {"bf16": {"enabled": True}},
     {"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 0}},
     {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "consecutive_hysteresis": True}}],
    ids=str,
)  # fmt: skip
def test_what_means_the_same_everywhere_passes(deepspeed_of: Callable[[bool], None], change: dict[str, Any]) -> None:
    deepspeed_of(False)
    document.check({**GOOD, **change}, 2)


def test_a_wandb_that_deepspeed_cannot_log_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = pytest.importorskip("wandb.sdk.wandb_run").Run
    enabled = {**GOOD, "wandb": {"enabled": True, "project": "p"}}

    def with_sync(self: Any, data: Any, step: Any = None, commit: Any = None, sync: Any = None) -> None: ...

    def without(self: Any, data: Any, step: Any = None, commit: Any = None) -> None: ...

    for given, taken, bad in ((with_sync, without, True), (with_sync, with_sync, False), (without, without, False)):
        monkeypatch.setattr(WandbMonitor, "log", given)
        monkeypatch.setattr(run, "log", taken)
        assert [key for key, *_ in older.unlogged(enabled)] == ["wandb.enabled"] * bad
        assert not list(older.unlogged({**GOOD, "wandb": {"enabled": False}}))
