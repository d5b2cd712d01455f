"""The DeepSpeed JSON as the user wrote it, judged before DeepSpeed reads it.

DeepSpeed checks some keys with assertions, divides by others, ignores names that it does not know, and some it uses on
one rank only. What can be known from the document alone is said here.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import chain
from typing import Any, cast

import hjson
import torch
from deepspeed.runtime import lr_schedules

from deepspeed_scape import older
from deepspeed_scape.config import (
    DENSE_NAMES,
    FILLABLE,
    OPTIMIZER_NAMES,
    UNMISTAKABLE,
    Refusal,
    ScapeConfigError,
    auto_remedy,
    refuse_all,
)

_OBJECTS = (
    "zero_optimization", "optimizer", "scheduler", "fp16", "bf16", "data_types", "checkpoint", "torch_autocast",
    "activation_checkpointing", "tensor_parallel", "expert_parallel", "compile", "flops_profiler", "comms_logger",
    "csv_monitor", "tensorboard", "wandb", "comet", "aio", "hybrid_engine", "autotuning", "data_efficiency",
    "timers", "amp", "elasticity", "weight_quantization", "pipeline",
)  # fmt: skip
_FLAGS = (
    "wall_clock_breakdown", "memory_breakdown", "dump_state", "prescale_gradients", "disable_allgather",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last", "check_overflow",
    "managed_gradient_accumulation", "use_data_before_expert_parallelism", "disable_python_gc", "sparse_gradients",
)  # fmt: skip
_COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OTHERS = (
    "gradient_clipping", "steps_per_print", "communication_data_type", "gradient_predivide_factor",
    "gradient_allreduce_op", "sequence_parallel_size", "seq_parallel_communication_data_type", "log_level",
)  # fmt: skip
_ALIASES = {  # as other libraries call them
    "grad_clip": "gradient_clipping", "clip_grad": "gradient_clipping", "clip_grad_norm": "gradient_clipping",
    "max_grad_norm": "gradient_clipping", "micro_batch_size": "train_micro_batch_size_per_gpu",
    "micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
}  # fmt: skip
# sections that DeepSpeed does not check: their flags, and their other keys
_UNCHECKED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "activation_checkpointing": (
        ("partition_activations", "contiguous_memory_optimization", "synchronize_checkpoint_boundary", "profile",
         "cpu_checkpointing"),
        ("number_checkpoints",),
    ),
    "checkpoint": (("load_universal", "use_node_local_storage"), ("tag_validation", "parallel_write", "writer")),
    "flops_profiler": (
        ("enabled", "detailed"), ("recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "output_file"),
    ),
    "torch_autocast": (("enabled",), ("dtype", "lower_precision_safe_modules")),
    "data_efficiency": (("enabled",), ("seed", "data_sampling", "data_routing")),
}  # fmt: skip
_UNKNOWN = "DeepSpeed knows no such key and would ignore it"
_NO_FLAG, _SET_FLAG = "must be true or false", "set it to one of them, or remove it"
_MONITORS = {"csv_monitor", "tensorboard", "wandb", "comet"}  # names of runs and groups, which may be any text
_MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}  # which rank 0 alone imports


def read(config: Any) -> dict[str, Any] | None:
    """The document: a dict, or the file of that name; None for what only DeepSpeed can read."""
    if isinstance(config, dict):
        return config
    if not isinstance(config, str | os.PathLike):  # a number would open a file descriptor
        return None
    try:
        found = _load(config)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


class _Object(dict[str, Any]):
    """A JSON object that knows which of its keys it was given more than once."""

    repeated: list[str]


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    found = _Object(pairs)
    names = [name for name, _ in pairs]
    found.repeated = [name for name in found if names.count(name) > 1]
    return found


def _load(path: str | os.PathLike[str]) -> Any:
    with open(path) as file:
        text = file.read()
    if not text.strip():
        raise ValueError("the file is empty")  # which hjson takes for an empty object
    try:
        return hjson.loads(text, object_pairs_hook=_object)
    except OverflowError:
        raise ValueError("it holds a number that is too large") from None
    except ValueError:
        if not re.search(r"^\s*(#|//|/\*)", text, re.MULTILINE):  # with comments it can only be hjson
            json.loads(text, parse_constant=_no_number)  # says better than hjson what is wrong, and where
        raise


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def as_written(error: ScapeConfigError, config: Any) -> ScapeConfigError:
    """The error with values as the file has them: hjson, by which DeepSpeed reads it, makes 1 of 1.0."""
    if not isinstance(config, str | os.PathLike):
        return error
    try:
        with open(config) as file:
            plain = json.load(file)
    except (OSError, ValueError):  # comments, and what else hjson allows
        return error
    told: list[Refusal] = []
    for key, value, problem, remedy in error.refusals:
        written = value_at(plain, key)
        told.append((key, written if written == value else value, problem, remedy))
    return ScapeConfigError(*told[0], others=told[1:])


def value_at(document: Any, key: str) -> Any:
    """What a document holds at ``section.key``; None for nothing."""
    node = document
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def remove(document: dict[str, Any], key: str) -> bool:
    """Take out a key, or the section that should hold it. Returns whether it was there."""
    section, _, name = key.rpartition(".")
    node = value_at(document, section) if section else document
    if not (isinstance(node, dict) and name in node):
        node, name = document, key.partition(".")[0]
    if name not in node:
        return False
    del node[name]
    if key.partition(".")[0] == "zero_optimization":  # DeepSpeed's default, 0, would be refused
        document.setdefault("zero_optimization", {}).setdefault("stage", 2)
    return True


def fault(config: Any) -> str | None:
    """What is wrong with a file of that name that nobody can read as a document; None where there is none."""
    if not isinstance(config, str | os.PathLike):
        return None
    if not os.path.isfile(config):  # DeepSpeed would take it for a document in base64
        return "there is no such file" if os.fspath(config).endswith(".json") else None
    try:
        found = _load(config)
    except (OSError, ValueError) as error:
        return f"it is not JSON: {error}"
    return None if isinstance(found, dict) else "it holds no JSON object"


def is_ours(document: dict[str, Any], client: Any = None) -> bool:
    """Whether the document, or the script, asks for SCAPE or AdamS, if need be with a slip of the pen."""
    from deepspeed_scape.optimizer import Scape

    optimizer = document.get("optimizer")
    if isinstance(client, Scape):
        return True
    if optimizer is None:
        near = difflib.get_close_matches("optimizer", [str(name) for name in document], cutoff=0.84)
        return any(_asks_for_us(document[name]) for name in near if isinstance(document[name], dict))
    if not isinstance(optimizer, dict):
        return True  # DeepSpeed fails on it whatever it means
    nobodys = client is None and bool(optimizer) and "type" not in optimizer
    return nobodys or _asks_for_us(optimizer)


def _asks_for_us(optimizer: dict[str, Any]) -> bool:
    params = optimizer.get("params")
    return _resembles(optimizer.get("type")) or bool(isinstance(params, dict) and UNMISTAKABLE & set(params))


def _resembles(name: Any) -> bool:
    names = {known.lower() for known in (*OPTIMIZER_NAMES, *DENSE_NAMES)}
    written = str(name).strip("[]' ").lower()
    # "adam" is near AdamS and somebody else's; no optimizer of DeepSpeed's or torch's is near SCAPE
    return written in names or bool(difflib.get_close_matches(written, ["scape"], cutoff=0.8))


def check(document: dict[str, Any], world_size: int | None) -> None:
    """Refuse everything in the document that cannot work.

    Args:
        document: what the user wrote, or a trainer has filled in.
        world_size: data-parallel ranks; None where they are not known, and the batch is not judged.

    Raises:
        ScapeConfigError: names the keys, their values and the remedies.
    """
    forms = list(chain(*(part(document) for part in (_repeated, _bad_names, _bad_auto, _bad_types, _bad_sections))))
    rest = copy.deepcopy(document)
    for key, *_ in forms:
        remove(rest, key)
    values = (older.ignored, older.unchecked, older.unlogged, _bad_numbers, _bad_stage, _bad_optimizer, _bad_precision,
              _bad_scheduler)  # fmt: skip
    found = [*forms, *chain(*(part(rest) for part in values))]
    if world_size is not None and not any(key in _COUNTS for key, *_ in forms):
        found += _bad_batch(rest, world_size)
    refuse_all(found)


def _repeated(node: Any, where: str = "") -> Iterator[Refusal]:
    """Keys that stand twice in one object of a file."""
    if not isinstance(node, dict):
        return
    for name in getattr(node, "repeated", ()):
        yield f"{where}{name}", node[name], "it stands there more than once", "leave one"
    for name, value in node.items():
        yield from _repeated(value, f"{where}{name}.")


def _bad_names(document: dict[str, Any]) -> Iterator[Refusal]:
    """DeepSpeed ignores top-level names that it does not know, so a slip of the pen would be silent.

    A known name with a mark, such as ``_optimizer`` or ``optimizer-old``, is taken for what somebody has put aside.
    """
    known = [*_OBJECTS, *_FLAGS, *_COUNTS, *_OTHERS]
    for name in (str(name) for name in document if name not in known):
        value = document.get(name)
        alias = _ALIASES.get(name)
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.84)
        if alias is not None and alias not in document:
            yield name, value, _UNKNOWN, f"write {alias}"
        elif close and not (close[0] in document and _is_put_aside(name, close[0])):
            yield name, value, _UNKNOWN, f"write {close[0]}"
        elif name in UNMISTAKABLE:
            yield name, value, "an option of SCAPE, which DeepSpeed ignores here", "move it into optimizer.params"
        elif name.lower() == "scape":
            yield name, value, "DeepSpeed ignores such a section", "SCAPE's options go into optimizer.params"


def _is_put_aside(name: str, known: str) -> bool:
    before, found, after = name.partition(known)
    return bool(found) and not before[-1:].isalpha() and not after[:1].isalpha()


def _bad_sections(document: dict[str, Any]) -> Iterator[Refusal]:
    for section, (flags, others) in _UNCHECKED.items():
        given = document.get(section)
        for name, value in given.items() if isinstance(given, dict) else ():
            close = difflib.get_close_matches(str(name), (*flags, *others), n=1, cutoff=0.8)
            if name in flags and not isinstance(value, bool) and value != "auto":
                yield f"{section}.{name}", value, _NO_FLAG, _SET_FLAG
            elif close and name not in (*flags, *others):
                yield f"{section}.{name}", value, _UNKNOWN, f"write {close[0]}"


def _bad_auto(document: dict[str, Any]) -> Iterator[Refusal]:
    """An "auto" that nobody filled in: over some DeepSpeed trips, for others it takes its default in silence."""
    known = {*_OBJECTS, *_FLAGS, *_COUNTS, *_OTHERS} - _MONITORS
    for key in _autos({name: value for name, value in document.items() if name in known}):
        section, _, name = key.partition(".")
        # bucket sizes and stage3_*: the Trainer leaves some, DeepSpeed leaves them out, SCAPE reads none
        if section != "zero_optimization" or name == "stage" or "." in name:
            yield key, "auto", "nobody has filled it in", auto_remedy(key)


def _autos(node: Any, where: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _autos(value, f"{where}.{name}".lstrip("."))
    elif node == "auto":
        yield where


def without_autos(document: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The document as far as it is known before a trainer fills it in, and the keys that are left to one."""
    left = [key for key in _autos(document) if key in FILLABLE]
    known = copy.deepcopy(document)
    for key in left:
        *sections, name = key.split(".")
        node = known
        for section in sections:
            node = node[section]
        del node[name]
    if set(_COUNTS) & set(left):
        known.pop(_COUNTS[0], None)  # nothing of a batch can be judged from a part of it
        known.setdefault(_COUNTS[1], 1)
    return known, left


def _bad_types(document: dict[str, Any]) -> Iterator[Refusal]:
    for name in _OBJECTS:
        if name in document and not isinstance(document[name], dict):
            yield name, document[name], "must be a JSON object", f'write "{name}": {{...}}, or remove it'
    for name in _FLAGS:
        if name in document and not isinstance(document[name], bool):
            yield name, document[name], _NO_FLAG, _SET_FLAG


def missing_monitors(document: dict[str, Any]) -> Iterator[Refusal]:
    """Monitors of a document that has passed ``check`` whose module this process cannot import. Rank 0 alone will."""
    for section, module in _MODULES.items():
        if document.get(section, {}).get("enabled") and find_spec(module) is None:
            yield f"{section}.enabled", True, f"{module} is not installed", f"pip install {module}, or set it to false"


def _bad_numbers(document: dict[str, Any]) -> Iterator[Refusal]:
    for name in _COUNTS:
        value = document.get(name)
        if value is not None and not _is_count(value):
            yield name, value, "must be a whole number above 0", "give one, or remove it and let DeepSpeed derive it"
    clip = document.get("gradient_clipping", 0.0)
    if not (_is_number(clip) and clip >= 0):
        yield "gradient_clipping", clip, "must be a number, 0 or above", "give a norm, or 0 for no clipping"
    every = document.get("steps_per_print")
    if every not in (None, math.inf) and not _is_count(every):  # Accelerate writes inf: never
        yield "steps_per_print", every, "must be a whole number above 0 (rank 0 divides by it)", "give one, or null"
    divide = document.get("gradient_predivide_factor", 1.0)
    if not (_is_number(divide) and divide > 0):
        yield "gradient_predivide_factor", divide, "must be a number above 0", "remove it: SCAPE averages in fp32"
    sequence = document.get("sequence_parallel_size", 1)
    if not _is_count(sequence):
        yield "sequence_parallel_size", sequence, "must be a whole number above 0", "set it to 1"
    tensor = document.get("tensor_parallel", {}).get("autotp_size", 0)
    if not (_is_int(tensor) and tensor >= 0):
        yield "tensor_parallel.autotp_size", tensor, "must be a whole number", "set it to 0"


def _bad_stage(document: dict[str, Any]) -> Iterator[Refusal]:
    stage = document.get("zero_optimization", {}).get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        yield "zero_optimization.stage", stage, "ZeRO has no such stage", "write 1 or 2, on which SCAPE works"


def _bad_optimizer(document: dict[str, Any]) -> Iterator[Refusal]:
    optimizer = document.get("optimizer")
    if optimizer is None:
        return
    name, params = optimizer.get("type"), optimizer.get("params", {})
    known = (*OPTIMIZER_NAMES, *DENSE_NAMES)
    if not isinstance(name, str) or (name not in known and _resembles(name)):
        yield "optimizer.type", name, "no optimizer of that name", f"write {OPTIMIZER_NAMES[0]} or {DENSE_NAMES[0]}"
    if params is not None and not isinstance(params, dict):
        yield "optimizer.params", params, "must be a JSON object", 'write "params": {...}'
    for extra in sorted(set(optimizer) - {"type", "params", "legacy_fusion"}):
        close = difflib.get_close_matches(str(extra).lower(), ["type", "params"], n=1, cutoff=0.8)
        remedy = f"write {close[0]}" if close else "options go into optimizer.params"
        yield f"optimizer.{extra}", optimizer[extra], "DeepSpeed would ignore it", remedy


def _bad_precision(document: dict[str, Any]) -> Iterator[Refusal]:
    if all(document.get(name, {}).get("enabled") is True for name in ("fp16", "bf16")):
        yield "fp16.enabled", True, "bf16.enabled is true as well", "set one of them to false"
    power = document.get("fp16", {}).get("initial_scale_power", 16)
    if _is_int(power) and not 0 <= power < 64:
        yield "fp16.initial_scale_power", power, "2 to that power is no loss scale", "use 4 to 32"
    dtypes = document.get("data_types", {})
    wanted = dtypes.get("grad_accum_dtype")
    if wanted not in (None, "fp32", "bf16", "fp16"):
        yield "data_types.grad_accum_dtype", wanted, "unknown dtype", "use fp32, bf16 or fp16"
    for name in set(dtypes) - {"grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"}:
        yield f"data_types.{name}", dtypes[name], "DeepSpeed would ignore it", "write grad_accum_dtype"


def _bad_batch(document: dict[str, Any], world_size: int) -> Iterator[Refusal]:
    total, micro, steps = counts = [document.get(name) for name in _COUNTS]
    if not all(count is None or _is_count(count) for count in counts):
        return
    if total is None and micro is None:
        yield _COUNTS[1], None, "neither it nor train_batch_size is given", "give one of the two"
        return
    if total is None:
        return
    each, rest = divmod(total, (micro or 1) * (steps or 1) * world_size)
    exact = each == 1 or micro is None or steps is None
    if rest or not each or not exact:
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        parts = f"{micro or 'any'} a rank x {steps or 'any'} accumulation steps x {ranks}"
        remedy = "change it, or remove it and let DeepSpeed derive it"
        yield _COUNTS[0], total, f"does not go with {parts}", remedy


def _bad_scheduler(document: dict[str, Any]) -> Iterator[Refusal]:
    """Try the scheduler on an optimizer of one parameter; DeepSpeed builds it only when the model is set up."""
    scheduler = document.get("scheduler")
    if scheduler is None:
        return
    name, params = scheduler.get("type"), scheduler.get("params") or {}
    known = ", ".join(lr_schedules.VALID_LR_SCHEDULES)
    if name is None:
        if scheduler:
            yield "scheduler.type", None, "DeepSpeed would train without a schedule", f"give one of {known}"
        return
    kind: Any = getattr(lr_schedules, str(name), None)
    if kind is None or not inspect.isclass(kind):
        problem = "DeepSpeed makes no such scheduler under ZeRO"
        yield "scheduler.type", name, problem, f"use one of {known}, or pass lr_scheduler=FUNCTION for one of torch's"
        return
    if not isinstance(params, dict):
        yield "scheduler.params", params, "must be a JSON object", 'write "params": {...}'
        return
    if wrong := list(_bad_arguments(str(name), kind, params)):
        yield from wrong
        return
    try:
        optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1e-3)
        trial = cast(Callable[..., Any], kind)(optimizer, **params)
        for _ in range(3):
            trial.step()
        rates = [group["lr"] for group in optimizer.param_groups]
    except Exception as error:
        yield "scheduler.params", params, f"{name} does not take it ({error})", "see the parameters of that scheduler"
        return
    if not all(_is_number(rate) and rate >= 0 for rate in rates):
        yield "scheduler.params", params, f"{name} makes a learning rate of {rates[0]}", "give rates of 0 or above"
    total, warmup = (getattr(trial, key, None) for key in ("total_num_steps", "warmup_num_steps"))
    if total is not None and warmup is not None and total < warmup:
        problem = f"the schedule ends before its warm-up of {warmup} steps (warmup_num_steps) does"
        yield "scheduler.params.total_num_steps", total, problem, "make it more, or warmup_num_steps less"


def _bad_arguments(name: str, kind: Any, params: dict[str, Any]) -> Iterator[Refusal]:
    """Parameters that a scheduler does not know, or does not get."""
    taken = dict(list(inspect.signature(kind).parameters.items())[1:])  # the first is the optimizer
    for extra in params:
        if extra not in taken:
            remedy = f"use {', '.join(taken)}"
            yield f"scheduler.params.{extra}", params[extra], f"{name} knows no such parameter", remedy
        elif _wants_number(taken[extra]) and not isinstance(params[extra], int | float | list | None):
            yield f"scheduler.params.{extra}", params[extra], "must be a number", "give one"
    for needed, parameter in taken.items():
        if parameter.default is inspect.Parameter.empty and needed not in params:
            yield f"scheduler.params.{needed}", None, f"{name} needs it", "give it"


def _wants_number(parameter: inspect.Parameter) -> bool:
    default = parameter.default
    return parameter.annotation in (int, float) or (_is_number(default) and parameter.annotation is parameter.empty)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_int(value) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
