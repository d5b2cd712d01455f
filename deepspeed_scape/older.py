"""What an older DeepSpeed takes without a word, where a later one knows the key or refuses it.

Silence would train something else than the document says. Only what the installed DeepSpeed leaves open is judged here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated, Any

import deepspeed
from deepspeed.monitor.wandb import WandbMonitor
from deepspeed.runtime import config as stock
from pydantic import BaseModel, Field, ValidationError, model_validator

from deepspeed_scape.config import Refusal

_REMEDY = "remove it, or install a later DeepSpeed"
_DATA_TYPES = ("param_dtype", "buffer_dtype", "keep_in_fp32_modules")


class _Fp16(BaseModel, extra="forbid"):
    """The section as DeepSpeed 0.19.8 types it."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: int = 1
    fp16_master_weights_and_grads: bool = False

    @model_validator(mode="after")
    def _can_follow_overflows(self) -> _Fp16:
        if self.enabled and self.loss_scale == 0:
            for name in ("loss_scale_window", "min_loss_scale"):
                if getattr(self, name) <= 0:
                    raise ValueError(f"{name} must be above 0 where the loss scale is dynamic")
        return self


class _Bf16(BaseModel, extra="forbid"):
    """The section as DeepSpeed 0.19.8 types it."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


def knows(key: str) -> bool:
    """Whether this DeepSpeed reads a key that came after 0.16.9: each of them has a constant of its name."""
    return hasattr(stock, key.upper())


def ignored(document: dict[str, Any]) -> Iterator[Refusal]:
    """Keys of a later DeepSpeed that change what is trained, where they ask for more than the default."""
    asked = {
        "torch_autocast": document.get("torch_autocast", {}).get("enabled", False),
        "expert_parallel": document.get("expert_parallel", {}).get("enabled", False),
        "managed_gradient_accumulation": not document.get("managed_gradient_accumulation", True),
    }
    dtypes = {name: document.get("data_types", {}).get(name) for name in _DATA_TYPES}
    problem = f"DeepSpeed {deepspeed.__version__} knows no such key and would ignore it"
    for key, more in asked.items():
        if more and not knows(key):
            yield key, document[key], problem, _REMEDY
    for name, value in dtypes.items():
        if value is not None and not knows(name):
            yield f"data_types.{name}", value, problem, _REMEDY


def unchecked(document: dict[str, Any]) -> Iterator[Refusal]:
    """A slip of the pen in fp16 or bf16, which a DeepSpeed without a model of these sections takes for the default."""
    if hasattr(stock, "get_float16_config"):
        return
    for section, model in (("fp16", _Fp16), ("bf16", _Bf16)):
        try:
            model(**document.get(section, {}))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join((section, *map(str, first["loc"])))
            extra = first["type"] == "extra_forbidden"
            problem = "DeepSpeed knows no such key" if extra else first["msg"].removeprefix("Value error, ")
            yield key, first["input"], problem, "correct it or remove it"


def unlogged(document: dict[str, Any]) -> Iterator[Refusal]:
    """An older DeepSpeed hands W&B an argument that it has dropped: rank 0 alone would fail, at its first step."""
    if not document.get("wandb", {}).get("enabled") or find_spec("wandb") is None:
        return
    import wandb
    from wandb.sdk.wandb_run import Run

    given, taken = (inspect.signature(kind.log).parameters for kind in (WandbMonitor, Run))
    if "sync" in given and "sync" not in taken:
        problem = f"DeepSpeed {deepspeed.__version__} calls wandb.log(sync=...), which wandb {wandb.__version__} lacks"
        yield "wandb.enabled", True, problem, "install a later DeepSpeed or an older wandb, or set it to false"
