"""Which keys of a document DeepSpeed's own configuration refuses.

DeepSpeed stops at its first mistake and seldom names the key. So keys are taken out until it is content: the one that
makes its complaint go away is the culprit, and what it says next is the next mistake.
"""

from __future__ import annotations

import copy
import difflib
import logging
from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.utils import logger
from pydantic import ValidationError

from deepspeed_scape.config import Refusal
from deepspeed_scape.document import remove, value_at

_APART = ("optimizer", "scheduler", "train_batch_size")  # judged elsewhere; the ranks are not known here


def refused_by_deepspeed(document: dict[str, Any], known: list[Refusal]) -> tuple[list[Refusal], Any]:
    """Everything that DeepSpeed's configuration refuses, beside what is known.

    Args:
        document: as the user wrote it.
        known: what is refused already.

    Returns:
        The refusals, and the ``DeepSpeedConfig`` of the rest; None for one that cannot be made.
    """
    rest = copy.deepcopy({key: value for key, value in document.items() if key not in _APART})
    for key, *_ in known:
        remove(rest, key)
    found: list[Refusal] = []
    while True:
        config, error = _read(rest)
        if error is None:
            return found, config
        refusals = list(_explain(error, rest))
        removed = [remove(rest, key) for key, *_ in refusals]
        if not any(removed):  # no key is to blame
            return found, None
        found += refusals


def _read(document: dict[str, Any]) -> tuple[Any, Exception | None]:
    given = copy.deepcopy(document)
    if "elasticity" not in given:  # which wants no batch size beside it
        given["train_micro_batch_size_per_gpu"] = 1
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it would repeat its warnings each time
    try:
        return DeepSpeedConfig(given), None
    except Exception as error:
        return None, error
    finally:
        logger.setLevel(level)


def _explain(error: Exception, document: dict[str, Any]) -> Iterator[Refusal]:
    section = next((name for name in document if _is_culprit(name, document, error)), None)
    if section is None:
        return
    if isinstance(error, ValidationError):
        yield from _explain_fields(error, section, document)
        return
    value = document[section]
    inner = (f"{section}.{name}" for name in value) if isinstance(value, dict) else iter(())
    key = next((name for name in inner if _is_culprit(name, document, error)), section)
    text = str(error).rstrip(". ") or type(error).__name__
    remedy = "remove it" if "has been removed" in text else "correct it or remove it"
    yield key, value_at(document, key), f"DeepSpeed refuses it: {text}", remedy


def _is_culprit(key: str, document: dict[str, Any], error: Exception) -> bool:
    """Whether DeepSpeed no longer says the same without the key."""
    rest = copy.deepcopy(document)
    remove(rest, key)
    _, other = _read(rest)
    return (type(other), str(other)) != (type(error), str(error))


def _explain_fields(error: ValidationError, section: str, document: dict[str, Any]) -> Iterator[Refusal]:
    for each in error.errors(include_url=False):
        path = [str(part) for part in each["loc"]]
        inside = value_at(document, ".".join([section, *path[:1]])) is not None
        whole = path and not inside and path[0] in document  # of a model of several sections
        key = ".".join(path if whole else [section, *path])
        problem = each["msg"].removeprefix("Value error, ").rstrip(".")
        remedy = "correct it or remove it"
        if each["type"] == "extra_forbidden":
            problem = "DeepSpeed knows no such key"
            close = difflib.get_close_matches(path[-1], _fields(error.title), n=1)
            remedy = f"write {close[0]}" if close else remedy
        yield key, each["input"], problem, remedy


def _fields(model: str) -> list[str]:
    """The names that one of DeepSpeed's sections knows; none for a section inside another."""
    found = next((kind for kind in DeepSpeedConfigModel.__subclasses__() if kind.__name__ == model), None)
    return [] if found is None else list(found.model_fields)
