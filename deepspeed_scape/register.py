"""The JSON switch: how DeepSpeed comes to know, check and build our optimizers.

- ``getattr(torch.optim, type)`` is where DeepSpeed looks up a type that it does not know, so the classes go there.
- ``DeepSpeedEngine._configure_zero_optimizer`` reads the module global ``DeepSpeedZeroOptimizer`` when it is called, so
  our subclass stands there for the time of that call, when the optimizer is ours.
- ``_do_optimizer_sanity_check`` would send stage 1 + bf16 + fp32 accumulation to ``BF16_Optimizer``.
- ``save_checkpoint`` and ``load_checkpoint`` are made atomic (``saving.py``) where the optimizer is ours.
- ``_do_sanity_check`` is the first place where the engine knows its configuration: bad options stop there.
- ``deepspeed.initialize`` is where everything begins: what is wrong with the JSON is said there (``initialize.py``).
- ``OpBuilder.jit_load`` compiles an extension at its first use, minutes on CPUs, in silence: it is announced there.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from deepspeed.utils import logger

from deepspeed_scape import build_locks, saving
from deepspeed_scape.adams import AdamS
from deepspeed_scape.backward import divide_at_parameters
from deepspeed_scape.config import DENSE_NAMES, OPTIMIZER_NAMES, ScapeConfigError
from deepspeed_scape.initialize import guarded
from deepspeed_scape.monitor import StepMonitor
from deepspeed_scape.optimizer import Scape
from deepspeed_scape.refuse import check_engine, check_model, check_monitors, check_settings
from deepspeed_scape.zero import ScapeZeroOptimizer

SUPPORTED = ">=0.16.9,<0.20"

# every DeepSpeed name that we override, wrap or rely on
_NEEDED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "DeepSpeedEngine": (
        engine_module.DeepSpeedEngine,
        (
            "_do_sanity_check",
            "_set_distributed_vars",
            "_do_optimizer_sanity_check",
            "_configure_zero_optimizer",
            "save_checkpoint",
            "load_checkpoint",
            "load_module_state_dict",
            "load_universal_checkpoint",
            "use_node_local_storage",
            "_get_ckpt_name",
            "_copy_recovery_script",
        ),
    ),
    "deepspeed.runtime.engine": (engine_module, ("DeepSpeedZeroOptimizer",)),
    "OpBuilder": (OpBuilder, ("jit_load",)),
    "DeepSpeedZeroOptimizer": (
        DeepSpeedZeroOptimizer,
        (
            "initialize_optimizer_states",
            "process_gradients",
            "reduce_ready_partitions_and_remove_grads",
            "reduce_gradients",
            "overlapping_partition_gradients_reduce_epilogue",
            "backward_epilogue",
            "step",
            "zero_grad",
            "state_dict",
            "_load_legacy_checkpoint",
            "_load_universal_checkpoint",
            "_load_global_state",
            "update_lp_params",
            "_link_all_hp_params",
            "_lazy_init_hp_params_optimizer_state",
            "_update_scale",
        ),
    ),
}


def register() -> None:
    """Make the JSON types known and wrap the engine; does nothing the second time.

    Raises:
        ImportError: this DeepSpeed lacks a name that we override.
    """
    check_internals()
    if _speaks() and not hasattr(torch.optim, OPTIMIZER_NAMES[0]):  # said once
        for path in build_locks.left_behind():
            if path.parent.name == build_locks.NEEDED and "--doctor" not in sys.orig_argv:  # which tells them all
                logger.warning(f"SCAPE: {build_locks.complaint(path)}")
    for name in OPTIMIZER_NAMES:
        setattr(torch.optim, name, Scape)
    for name in DENSE_NAMES:
        setattr(torch.optim, name, AdamS)
    for kind in (Scape, AdamS):
        if kind not in ZERO_SUPPORTED_OPTIMIZERS:
            ZERO_SUPPORTED_OPTIMIZERS.append(kind)
    _wrap("_do_sanity_check", _sanity_check)
    _wrap("_set_distributed_vars", _distributed_vars)
    _wrap("_do_optimizer_sanity_check", _optimizer_sanity_check)
    _wrap("_configure_zero_optimizer", _configure_zero_optimizer)
    _wrap("jit_load", _announced, OpBuilder)
    _wrap_initialize()
    _wrap("save_checkpoint", _where_ours(saving.save_checkpoint))
    _wrap("load_checkpoint", _where_ours(saving.load_checkpoint, saving.refuse_ours))


def check_internals() -> None:
    """Find out at import, not in the middle of a run, that DeepSpeed has changed under us.

    Raises:
        ImportError: names what is missing and the versions that work.
    """
    missing = [
        f"{where}.{name}" for where, (owner, names) in _NEEDED.items() for name in names if not hasattr(owner, name)
    ]
    if missing:
        raise ImportError(
            f"deepspeed {deepspeed.__version__} lacks {', '.join(missing)}, which deepspeed_scape overrides. "
            f"Remedy: pip install 'deepspeed{SUPPORTED}'"
        )


def _wrap(name: str, around: Callable[..., Any], owner: Any = engine_module.DeepSpeedEngine) -> None:
    """Put ``around(stock, self, ...)`` in the place of a method, once."""
    stock = getattr(owner, name)
    if getattr(stock, "wrapped_by_scape", False):
        return

    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(stock, self, *args, **kwargs)

    method.wrapped_by_scape = True  # type: ignore[attr-defined]
    setattr(owner, name, method)


def _wrap_initialize() -> None:
    stock = deepspeed.initialize
    if getattr(stock, "wrapped_by_scape", False):
        return
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        try:
            return guarded(stock, signature.bind(*args, **kwargs))
        except ScapeConfigError as error:
            if error.__cause__ is not None:  # an error of DeepSpeed's, of which we may have made the wrong sense
                raise
            raise error.with_traceback(None) from None  # the way to it through DeepSpeed's code helps nobody

    initialize.wrapped_by_scape = True  # type: ignore[attr-defined]
    deepspeed.initialize = initialize


def _speaks() -> bool:
    """Whether this process tells what is the same for all of this machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _announced(stock: Callable[..., Any], builder: Any, *args: Any, **kwargs: Any) -> Any:
    if _speaks() and get_accelerator().device_name() == "cpu" and not build_locks.is_built(builder.name):
        logger.warning(f"SCAPE: {build_locks.to_come(builder.name)}")
    return stock(builder, *args, **kwargs)


def _where_ours(around: Callable[..., Any], elsewhere: Callable[..., Any] | None = None) -> Callable[..., Any]:
    def choose(stock: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(engine.optimizer, ScapeZeroOptimizer):
            return around(stock, engine, *args, **kwargs)
        return stock(engine, *args, **kwargs) if elsewhere is None else elsewhere(stock, engine, *args, **kwargs)

    return choose


def _sanity_check(stock: Callable[..., Any], engine: Any) -> None:
    check_engine(engine)
    stock(engine)


def _distributed_vars(stock: Callable[..., Any], engine: Any, args: Any) -> None:
    stock(engine, args)
    check_monitors(engine)  # not earlier: the ranks' devices are set only now


def _optimizer_sanity_check(stock: Callable[..., Any], engine: Any, basic_optimizer: Any) -> Any:
    if isinstance(basic_optimizer, Scape):
        check_settings(engine._config)  # a client callable has built its optimizer only now
        check_model(engine)
        return engine_module.ZERO_OPTIMIZATION
    return stock(engine, basic_optimizer)


def _configure_zero_optimizer(stock: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    if not isinstance(optimizer, Scape):
        return stock(engine, optimizer)
    _drop_frozen_groups(optimizer, engine.client_lr_scheduler)
    dense = engine_module.DeepSpeedZeroOptimizer
    engine_module.DeepSpeedZeroOptimizer = ScapeZeroOptimizer
    try:
        zero_optimizer = stock(engine, optimizer)
    finally:
        engine_module.DeepSpeedZeroOptimizer = dense
    zero_optimizer.monitor = StepMonitor(engine)
    divide_at_parameters(engine, zero_optimizer)
    return zero_optimizer


def _drop_frozen_groups(optimizer: Scape, scheduler: Any) -> None:
    """DeepSpeed drops groups without parameters, but trips over groups in which nothing can be trained."""
    trainable = [g for g in optimizer.param_groups if any(p.requires_grad and p.numel() for p in g["params"])]
    if not trainable:
        raise ScapeConfigError("model_parameters", "all frozen", "there is nothing to train", "unfreeze a parameter")
    if len(trainable) < len(optimizer.param_groups):
        if scheduler is not None and not callable(scheduler):  # it has counted the groups already
            raise ScapeConfigError(
                "lr_scheduler",
                type(scheduler).__name__,
                "it was built for parameter groups in which nothing can be trained, and these are left out",
                "leave frozen groups out of the optimizer, or pass a function that builds the scheduler",
            )
        logger.warning(f"SCAPE: {len(optimizer.param_groups) - len(trainable)} frozen parameter groups are left out")
        optimizer.param_groups[:] = trainable
