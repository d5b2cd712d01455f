"""The DeepSpeed configuration that a run uses: the JSON file with the command line's changes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from deepspeed_scape.config import OPTIMIZER_NAMES

Config = dict[str, Any]

SECTIONS = ("optimizer", "scheduler", "fp16", "bf16", "zero_optimization", "data_types", "activation_checkpointing")
_WORD = re.compile(r"[A-Za-z_][\w./-]*")
_NOT_JSON = {"True": "true", "False": "false", "None": "null"}


def read_config(path: str) -> Config:
    """The JSON object in `path`. Raises ValueError if it can't be read, is no JSON object, or says "auto"."""
    try:
        config = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"--deepspeed_config {path}: {error.strerror}; ds_configs/ has ready ones") from None
    except ValueError as error:
        raise ValueError(f"--deepspeed_config {path}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--deepspeed_config {path}: holds a {type(config).__name__}, expected a JSON object")
    return config


def parse_override(text: str) -> tuple[list[str], Any]:
    """`a.b=VALUE` as (["a", "b"], value): VALUE is JSON, or a bare word that is meant as a string.

    Raises ValueError for a missing "=", an empty key, or a value that is neither.
    """
    path, equals, raw = text.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise ValueError(f"--set {text}: expected KEY.KEY=VALUE, such as optimizer.params.sparsity=0.99")
    if raw in _NOT_JSON:
        raise ValueError(f"--set {text}: {raw} is Python, not JSON; write {path}={_NOT_JSON[raw]}")
    try:
        return keys, json.loads(raw)
    except ValueError:
        if _WORD.fullmatch(raw):
            return keys, raw
        raise ValueError(f"--set {text}: {raw!r} is not valid JSON; quote a string as {path}='\"...\"'") from None


def apply_override(config: Config, text: str) -> None:
    """Set one dotted key in place. Sections of DeepSpeed's that the file lacks are made, others are taken for typos.

    Raises ValueError if a key on the way does not exist or is not an object.
    """
    keys, value = parse_override(text)
    node = config
    for depth, key in enumerate(keys[:-1]):
        may_make = keys[0] in SECTIONS if depth == 0 else keys[depth - 1 : depth + 1] == ["optimizer", "params"]
        if key not in node and may_make:
            node[key] = {}
        if not isinstance(node.get(key), dict):
            where = ".".join(keys[: depth + 1])
            raise ValueError(f"--set {text}: there is no section {where}; the file has {', '.join(sorted(node))}")
        node = node[key]
    node[keys[-1]] = value


def _set_batch(config: Config, micro_batch: int | None) -> None:
    """Fix micro-batch and accumulation, and leave the global batch for DeepSpeed to derive from the world size."""
    if micro_batch is not None:
        config["train_micro_batch_size_per_gpu"] = micro_batch
        config.pop("train_batch_size", None)
    if "train_batch_size" not in config:
        config.setdefault("train_micro_batch_size_per_gpu", 2)
        config.setdefault("gradient_accumulation_steps", 1)


def _refuse_auto(node: Any, where: str) -> None:
    """ "auto" is for the Hugging Face Trainer, which fills it in; nothing here would."""
    if node == "auto":
        raise ValueError(f'--deepspeed_config: {where} is "auto"; give a number, or --set {where}=VALUE')
    if isinstance(node, dict):
        for key, value in node.items():
            _refuse_auto(value, f"{where}.{key}".lstrip("."))


def resolve_config(path: str, overrides: list[str], *, lr: float | None, micro_batch: int | None) -> Config:
    """The file, then each `--set`, then `--lr` and `--micro-batch`. Raises ValueError naming what is wrong."""
    config = read_config(path)
    for text in overrides:
        apply_override(config, text)
    if "optimizer" not in config:
        raise ValueError(f"--deepspeed_config {path}: has no optimizer; add one, or --set optimizer.type=AdamW")
    if lr is not None:
        config["optimizer"].setdefault("params", {})["lr"] = lr
    _set_batch(config, micro_batch)
    config.setdefault("steps_per_print", 1_000_000_000)  # the loop has its own log
    _refuse_auto(config, "")
    return config


def set_scape_options(config: Config, **options: Any) -> None:
    """Give SCAPE these options, where it is the optimizer and the configuration does not set them itself."""
    optimizer = config["optimizer"]
    if isinstance(optimizer, dict) and optimizer.get("type") in OPTIMIZER_NAMES:
        optimizer["params"] = options | optimizer.get("params", {})
