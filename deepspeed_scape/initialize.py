"""``deepspeed.initialize`` with every complaint about a SCAPE configuration in one form.

What ``document.py`` finds comes first, before DeepSpeed reads anything. What DeepSpeed itself refuses, by an assertion,
a pydantic error or worse, is said again with key, value and remedy.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import ValidationError

from deepspeed_scape import document as documents
from deepspeed_scape.config import OPTIMIZER_NAMES, Refusal, ScapeConfigError
from deepspeed_scape.monitor import tell_wandb
from deepspeed_scape.optimizer import Scape
from deepspeed_scape.refuse import check_optimizer, check_settings, refusals_of

_SECTION_OF = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedBF16Config": "bf16",
    "CompileConfig": "compile",
    "TPTrainingConfig": "tensor_parallel",
    "DeepSpeedFlopsProfilerConfig": "flops_profiler",
    "CommsConfig": "comms_logger",
}


def guarded(stock: Callable[..., Any], arguments: inspect.BoundArguments) -> Any:
    """Call ``deepspeed.initialize``.

    Raises:
        ScapeConfigError: names the key, the value and the remedy, on every rank alike.
    """
    given = arguments.arguments
    config = next((given[name] for name in ("config", "config_params") if given.get(name) is not None), None)
    if config is None:
        config = getattr(given.get("args"), "deepspeed_config", None)
    try:
        return _guarded(stock, arguments, config)
    except ScapeConfigError as error:
        raise documents.as_written(error, config) from error.__cause__


def _guarded(stock: Callable[..., Any], arguments: inspect.BoundArguments, config: Any) -> Any:
    given = arguments.arguments
    document = documents.read(config)
    if document is None and (problem := documents.fault(config)) is not None:
        raise ScapeConfigError("DeepSpeed configuration", str(config), problem, "correct that file")
    if document is None or not documents.is_ours(document, given.get("optimizer")):
        return stock(*arguments.args, **arguments.kwargs)
    _check_accelerate()
    check(document, _world_size(given.get("mpu")), given.get("optimizer"))
    try:
        built = stock(*arguments.args, **arguments.kwargs)
    except ScapeConfigError:
        raise
    except ModuleNotFoundError as error:
        if error.name != "mpi4py":
            raise
        problem = "nobody has given this process its rank, and mpi4py, by which DeepSpeed would ask MPI, is not there"
        raise ScapeConfigError("RANK", None, problem, "start it with deepspeed --num_gpus N train.py ...") from None
    except Exception as error:
        ours = rephrase(error, document)
        if ours is None:
            raise
        raise with_others(ours, document, given.get("optimizer")) from error
    tell_wandb(built[0], document)
    return built


def check(document: dict[str, Any], world_size: int | None, client: Any = None) -> None:
    """Refuse what can be known from the document, and if that is anything, tell what else is wrong.

    Raises:
        ScapeConfigError: names the keys, their values and the remedies.
    """
    try:
        documents.check(document, world_size)
    except ScapeConfigError as error:
        raise with_others(error, document, client) from None


def with_others(error: ScapeConfigError, document: dict[str, Any], client: Any = None) -> ScapeConfigError:
    """The error with what else is wrong with the document, of each key what came first."""
    first: dict[str, Refusal] = {}
    for refusal in (*error.refusals, *_refusals_beside(document, error.refusals, client)):
        first.setdefault(refusal[0], refusal)
    told, *others = first.values()
    return ScapeConfigError(*told, others=others)


def _refusals_beside(document: dict[str, Any], refused: list[Refusal], client: Any) -> Iterator[Refusal]:
    """What else is wrong: DeepSpeed, which stops at a mistake, is asked again without it until it takes the rest."""
    optimizer = document.get("optimizer")
    optimizer = optimizer if isinstance(optimizer, dict) else {}
    name, params = optimizer.get("type"), optimizer.get("params") or {}
    if isinstance(name, str) and isinstance(params, dict):
        yield from refusals_of(check_optimizer, name, params, client)
    apart = ("optimizer", "scheduler", "train_batch_size", "elasticity")  # which allows no batch size beside it
    rest = copy.deepcopy({key: value for key, value in document.items() if key not in apart})
    for key, *_ in refused:
        _remove(rest, key)
    while True:
        try:
            config = DeepSpeedConfig({**copy.deepcopy(rest), "train_micro_batch_size_per_gpu": 1})
            break
        except Exception as error:
            ours = rephrase(error, rest)
            refusals = [] if ours is None else ours.refusals
            removed = [_remove(rest, key) for key, *_ in refusals]
            if not any(removed):
                return  # it says so itself, once what is known is in order
            yield from refusals
    if name in OPTIMIZER_NAMES or isinstance(client, Scape):
        yield from refusals_of(check_settings, config)


def _remove(document: dict[str, Any], key: str) -> bool:
    """Take out a key, or the section that should hold it. Returns whether it was there."""
    section, _, name = key.rpartition(".")
    node = documents.value_at(document, section) if section else document
    if not (isinstance(node, dict) and name in node):
        node, name = document, key.partition(".")[0]
    if name not in node:
        return False
    del node[name]
    if key.partition(".")[0] == "zero_optimization":  # DeepSpeed's default, 0, would be refused
        document.setdefault("zero_optimization", {}).setdefault("stage", 2)
    return True


def _world_size(mpu: Any) -> int:
    return int(mpu.get_data_parallel_world_size()) if hasattr(mpu, "get_data_parallel_world_size") else _ranks()


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def _check_accelerate() -> None:
    """Accelerate, and so the Trainer, may take each of several ranks for the only one: it shares out no data then.

    Raises:
        ScapeConfigError: it counts other processes than the launcher has started.
    """
    accelerate = sys.modules.get("accelerate")
    if accelerate is None or not accelerate.PartialState._shared_state:  # nobody has asked it yet
        return
    counted, started = accelerate.PartialState().num_processes, _ranks()
    if counted != started:
        problem = f"{started} ranks have been started, and Accelerate would give each of them the same data"
        remedy = "on CPUs give the Trainer --use_cpu, or Accelerator cpu=True; else start it by its own launcher"
        raise ScapeConfigError("accelerate's num_processes", counted, problem, remedy)


def rephrase(error: Exception, document: dict[str, Any]) -> ScapeConfigError | None:
    """What DeepSpeed says about its configuration, in our form; None for an error that is not about it."""
    if isinstance(error, ValidationError):
        first, *others = _refusals_of(error)
        return ScapeConfigError(*first, others=others)
    files = list(_files_of(error))
    about_config = any(file.endswith(os.path.join("runtime", "config.py")) for file in files)
    if not about_config and not (files and _is_deepspeeds(files[-1])):
        return None
    text = str(error).rstrip(".") or type(error).__name__
    key = max((name for name in _names(document) if name.rpartition(".")[2] in text), key=len, default="")
    if not key:
        return ScapeConfigError("configuration", "as given", f"DeepSpeed refuses it: {text}", "change what it names")
    value = documents.value_at(document, key)
    return ScapeConfigError(key, value, f"DeepSpeed refuses it: {text}", "correct it or remove it")


def _refusals_of(error: ValidationError) -> Iterator[Refusal]:
    for each in error.errors(include_url=False):
        path = [_SECTION_OF.get(error.title, ""), *map(str, each["loc"])]
        problem = each["msg"].removeprefix("Value error, ").rstrip(".")
        remedy = "correct it or remove it"
        if each["type"] == "extra_forbidden":
            problem = "DeepSpeed knows no such key"
            close = difflib.get_close_matches(path[-1], _fields(error.title), n=1)
            remedy = f"write {close[0]}" if close else remedy
        key = ".".join(part for part in path if part) or error.title
        yield key, each["input"], problem, remedy


def _fields(model: str) -> list[str]:
    """The names that one of DeepSpeed's sections knows; none for a section inside another."""
    found = next((kind for kind in DeepSpeedConfigModel.__subclasses__() if kind.__name__ == model), None)
    return [] if found is None else list(found.model_fields)


def _files_of(error: BaseException) -> Iterator[str]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename
        trace = trace.tb_next


def _is_deepspeeds(file: str) -> bool:
    return os.path.abspath(file).startswith(os.path.dirname(os.path.abspath(deepspeed.__file__)) + os.sep)


def _names(node: Any, where: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            path = f"{where}.{name}".lstrip(".")
            yield path
            yield from _names(value, path)
