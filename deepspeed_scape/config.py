"""Every option of SCAPE: type, default, range and meaning.

All of them live in ``optimizer.params`` of the DeepSpeed JSON: most of DeepSpeed's own sections reject unknown keys.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

OPTIMIZER_NAMES = ("SCAPE", "Scape", "scape")  # accepted as "type" in the DeepSpeed JSON
DENSE_NAMES = ("AdamS", "Adams", "adams")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# "auto" in the DeepSpeed JSON, as transformers 5 and accelerate 1 treat it (docs/trainers.md)
_FILLED_BY_BOTH = frozenset({
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "fp16.enabled", "bf16.enabled", "optimizer.params.lr", "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
})  # fmt: skip
_FILLED_BY_TRAINER = frozenset({"optimizer.params.betas", "optimizer.params.eps"})
FILLABLE = _FILLED_BY_BOTH | _FILLED_BY_TRAINER


Refusal = tuple[str, Any, str, str]  # key, value, problem, remedy


class ScapeConfigError(ValueError):
    """A configuration that SCAPE refuses. The message names the key, the value and the remedy.

    Args:
        others: what is wrong beside it, a line each below the first.
    """

    def __init__(self, key: str, value: Any, problem: str, remedy: str, others: Sequence[Refusal] = ()) -> None:
        lines = [f"{name} = {was!r}: {why}. Remedy: {cure}." for name, was, why, cure in others]
        super().__init__("\n".join([f"{key} = {value!r}: {problem}. Remedy: {remedy}.", *lines]))
        self.key, self.value, self.problem, self.remedy = key, value, problem, remedy
        self.refusals: list[Refusal] = [(key, value, problem, remedy), *others]


def refuse_all(refusals: Iterable[Refusal]) -> None:
    """Say everything that is wrong at once, of each key what comes first.

    Raises:
        ScapeConfigError: there is a refusal.
    """
    found: list[Refusal] = []
    for refusal in refusals:
        if refusal[0] not in (key for key, *_ in found):
            found.append(refusal)
    if found:
        raise ScapeConfigError(*found[0], others=found[1:])


class AdamSOptions(BaseModel):
    """Hyper-parameters of AdamS, per parameter group where the group sets its own."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    lr: float = Field(
        default=1e-3, ge=0, description="learning rate; an AdamS step is ~3x as long as AdamW's at one lr"
    )
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95),
        description="decay rates (b1, b2) of first moment and normalizer, each in [0, 1)",
    )
    eps: float = Field(default=1e-8, gt=0, description="added to the normalizer; > 0, or an unvisited element is 0/0")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, applied as (1 - lr*wd)")

    @field_validator("betas", mode="before")
    @classmethod
    def _list_to_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value  # JSON has no tuples

    @field_validator("betas")
    @classmethod
    def _below_one(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("each of betas must be in [0, 1)")
        return value

    @model_validator(mode="after")
    def _decay_below_one(self) -> AdamSOptions:
        if self.lr * self.weight_decay >= 1:
            raise ValueError(f"lr * weight_decay = {self.lr * self.weight_decay:g} must stay below 1")
        return self


class ScapeOptions(AdamSOptions):
    """Options of SCAPE. ``density = 1 - sparsity`` is the share of the elements that one step synchronises."""

    sparsity: float = Field(default=0.99, ge=0, lt=1, description="share of the elements that a step does not send")
    warmup_steps: int = Field(default=100, ge=0, description="dense steps before the first sparse one (docs/tuning.md)")
    normalizer: Literal["ema", "adams"] = Field(
        default="ema", description="'ema': running mean of the squared gradient; 'adams': the paper's AdamS normalizer"
    )
    selection: Literal["partition", "block"] = Field(
        default="partition", description="exact top-K over the ZeRO partition, or top-k within each block"
    )
    block_size: int = Field(default=200, ge=2, le=65536, description="elements of a block when selection is 'block'")
    residual_dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="dtype of the unsent gradients (P,)")
    residual_device: Literal["device", "cpu"] = Field(
        default="device",
        description="'cpu' saves GPU memory: what other owners are to get waits in pinned host memory",
    )
    value_dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="dtype of the reduced values on the wire")
    ballots: bool = Field(
        default=False, description="every rank tells the owners its largest unsent gradients, for better masks at W > 2"
    )
    overlap_comm: bool = Field(
        default=True,
        description="run the mask gather under forward and backward, the parameter gather under the selection",
    )
    check_replicas: int = Field(
        default=0, ge=0, description="compare all replicas and masters by checksum every N steps; 0 never"
    )
    timeout: float = Field(
        default=0,
        ge=0,
        le=1e6,
        description="seconds a rank waits for the others before the run ends with an error; 0 as long as torch does",
    )
    diagnostics_every: int = Field(
        default=0,
        ge=0,
        description="count residual norm, mask overlap and visits every N steps (docs/metrics.md); 0 never",
    )
    seed: int = Field(default=0, ge=0, description="seed of the threshold sample; it changes speed, never the mask")

    @model_validator(mode="after")
    def _block_holds_the_density(self) -> ScapeOptions:
        if self.selection == "block" and self.sparsity > 0:
            wanted = self.density * self.block_size
            kept = int(wanted + 0.5)
            if abs(kept - wanted) > 0.05 * wanted:
                fits = int(1 / self.density + 0.5)
                raise ValueError(
                    f"block_size = {self.block_size} keeps {wanted:g} elements a block, which is not a whole number; "
                    f"with sparsity = {self.sparsity:g} use a multiple of {max(fits, 2)}"
                )
        return self

    @model_validator(mode="after")
    def _ballots_have_a_mask(self) -> ScapeOptions:
        if self.ballots and self.sparsity == 0:
            raise ValueError(
                "ballots = true needs a mask to vote on, and sparsity = 0 makes none; set ballots to false"
            )
        return self

    @model_validator(mode="after")
    def _ballots_see_the_residual(self) -> ScapeOptions:
        if self.ballots and self.residual_device == "cpu":
            raise ValueError(
                'ballots = true ranks the whole residual on the device, and residual_device = "cpu" takes it away; set '
                'ballots to false or residual_device to "device"'
            )
        return self

    @property
    def density(self) -> float:
        return 1.0 - self.sparsity

    @property
    def residual_torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.residual_dtype]

    @property
    def value_torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.value_dtype]


def auto_remedy(key: str) -> str:
    """The remedy for an "auto" that has come through: who fills in which."""
    if key in _FILLED_BY_BOTH:
        return "give a value, or start through the Hugging Face Trainer or Accelerate, which fill it in"
    if key in _FILLED_BY_TRAINER:
        return "give a value; only the Hugging Face Trainer fills it in"
    return "give a value; nothing fills it in"


def _remedy(key: str, value: Any, meaning: str) -> str:
    if value == "auto":
        return auto_remedy(key)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return f"write {value.lower()} without quotes"
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            if math.isfinite(float(value)):
                return f"write {value} without quotes"
    if key.endswith(".sparsity") and isinstance(value, int | float) and 1 <= value < 100:
        return f"write {value / 100 if value > 1 else 0.99:g}: it is a share below 1"
    if key.endswith(".betas"):
        return "give two numbers, such as [0.9, 0.95]"
    return meaning


SCAPE_ONLY = frozenset(ScapeOptions.model_fields) - frozenset(AdamSOptions.model_fields)
UNMISTAKABLE = SCAPE_ONLY - {"seed"}  # where somebody else's options may stand: a seed may be anybody's


def parse_options(params: dict[str, Any], model: type[AdamSOptions], where: str = "optimizer.params") -> Any:
    """Validate ``params`` and return the frozen ``model``.

    Raises:
        ScapeConfigError: names every bad key, its value and the remedy.
    """
    try:
        return model(**params)
    except ValidationError as error:
        found = list(_refusals_of(error, params, model, where))
    refuse_all(found)  # outside of the handler: pydantic's own words would come first in a traceback


def _refusals_of(
    error: ValidationError, params: dict[str, Any], model: type[AdamSOptions], where: str
) -> Iterator[Refusal]:
    listed = f"; known options are {', '.join(model.model_fields)}"
    for each in error.errors(include_url=False):
        name = str(each["loc"][0]) if each["loc"] else ""
        if each["type"] == "extra_forbidden":
            close = difflib.get_close_matches(name.lower(), model.model_fields, n=1, cutoff=0.75)
            remedy = f"write {close[0]}" if close else f"remove it{listed}"
            listed = listed if close else ""  # once
            yield f"{where}.{name}", each["input"], "unknown option", remedy
            continue
        words = re.findall(r"\w+", each["msg"])
        named = {option: value for option, value in params.items() if option in words}
        key, value = (f"{where}.{name}", params[name]) if name else (where, named)
        meaning = model.model_fields[name].description if name in model.model_fields else None
        remedy = _remedy(key, value, f"{name}: {meaning}" if meaning else "change one of the two")
        yield key, value, each["msg"].removeprefix("Value error, ").rstrip("."), remedy
