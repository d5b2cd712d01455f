"""``deepspeed.initialize`` with every complaint about a SCAPE configuration in one form.

What ``document.py`` finds comes first, before DeepSpeed reads anything. What DeepSpeed itself refuses, by an assertion,
a pydantic error or worse, is said again with key, value and remedy.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch.distributed as dist

from deepspeed_scape import document as documents
from deepspeed_scape.config import OPTIMIZER_NAMES, Refusal, ScapeConfigError
from deepspeed_scape.culprits import refused_by_deepspeed
from deepspeed_scape.monitor import tell_wandb
from deepspeed_scape.optimizer import Scape
from deepspeed_scape.refuse import check_optimizer, check_settings, refusals_of


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
    optimizer = document.get("optimizer")
    optimizer = optimizer if isinstance(optimizer, dict) else {}
    name, params = optimizer.get("type"), optimizer.get("params") or {}
    if isinstance(name, str) and isinstance(params, dict):
        yield from refusals_of(check_optimizer, name, params, client)
    found, config = refused_by_deepspeed(document, refused)
    yield from found
    if config is not None and (name in OPTIMIZER_NAMES or isinstance(client, Scape)):
        yield from refusals_of(check_settings, config)


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
    if str(error) == "optimizer got an empty parameter list":
        remedy = "give a list, such as list(model.parameters()): a generator can be read only once"
        return ScapeConfigError("model_parameters", "empty", "there is nothing to train", remedy)
    files = list(_files_of(error))
    about_config = any(file.endswith(os.path.join("runtime", "config.py")) for file in files)
    if not about_config and not (files and _is_deepspeeds(files[-1])):
        return None
    found, _ = refused_by_deepspeed(document, [])
    if found:
        return ScapeConfigError(*found[0], others=found[1:])
    text = str(error).rstrip(". ") or type(error).__name__
    key = max((name for name in _names(document) if name.rpartition(".")[2] in text), key=len, default="")
    if not key:
        return ScapeConfigError("configuration", "as given", f"DeepSpeed refuses it: {text}", "change what it names")
    value = documents.value_at(document, key)
    return ScapeConfigError(key, value, f"DeepSpeed refuses it: {text}", "correct it or remove it")


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
