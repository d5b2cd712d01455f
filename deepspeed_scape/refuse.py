"""DeepSpeed settings that SCAPE cannot honour: found before training starts, from the configuration alone.

Every rank reads the same configuration, so every rank raises the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineModule

from deepspeed_scape import document as documents
from deepspeed_scape.config import (
    DENSE_NAMES,
    OPTIMIZER_NAMES,
    UNMISTAKABLE,
    AdamSOptions,
    Refusal,
    ScapeConfigError,
    ScapeOptions,
    parse_options,
    refuse_all,
)
from deepspeed_scape.optimizer import Scape


def check_engine(engine: Any) -> None:
    """Check options and DeepSpeed settings of an engine whose JSON or client optimizer may be ours.

    Raises:
        ScapeConfigError: names the key, the value and the remedy.
    """
    check_config(engine._config, *json_optimizer(engine), engine.client_optimizer)


def check_config(config: Any, name: str | None, params: dict[str, Any], client: Any = None) -> None:
    """Check the optimizer and, if it is ours, the settings of a DeepSpeed configuration.

    Raises:
        ScapeConfigError: names the keys, their values and the remedies.
    """
    ours = name in OPTIMIZER_NAMES or isinstance(client, Scape)
    refuse_all(
        [
            *refusals_of(check_optimizer, name, params, client),
            *(refusals_of(check_settings, config) if ours else []),
        ]
    )


def check_monitors(engine: Any) -> None:
    """Refuse on all ranks a monitor whose module rank 0 lacks; on the others, which do not use it, it may.

    Raises:
        ScapeConfigError: names the key and the remedy.
    """
    document = engine._config._param_dict
    if not engine._config.monitor_config.enabled or not documents.is_ours(document, engine.client_optimizer):
        return
    found = [list(documents.missing_monitors(document))]
    dist.broadcast_object_list(found, src=0)
    refuse_all(found[0])


def refusals_of(check: Callable[..., None], *given: Any) -> list[Refusal]:
    """What one of the checks refuses, as a list."""
    try:
        check(*given)
    except ScapeConfigError as error:
        return error.refusals
    return []


def check_optimizer(name: str | None, params: dict[str, Any], client: Any = None) -> None:
    """Check the optimizer section of a JSON, beside what the script itself passes.

    Raises:
        ScapeConfigError: names the key, the value and the remedy.
    """
    if name in OPTIMIZER_NAMES:
        if client is not None:
            raise ScapeConfigError(
                "optimizer.type", name, f"the script passes an optimizer of its own ({_name_of(client)})", "remove one"
            )
        parse_options(params, ScapeOptions)
    elif name in DENSE_NAMES and client is None:
        parse_options(params, AdamSOptions)
    elif foreign := sorted(UNMISTAKABLE & set(params)):
        raise ScapeConfigError(
            f"optimizer.params.{foreign[0]}",
            params[foreign[0]],
            f"an option of SCAPE, but optimizer.type is {name!r}",
            'set "type": "SCAPE" or remove the option',
        )


def json_optimizer(engine: Any) -> tuple[str | None, dict[str, Any]]:
    """Type and params of the JSON's optimizer section, which a client optimizer hides from DeepSpeed."""
    config = engine._config
    return config.optimizer_name, dict(config.optimizer_params or {})


def check_settings(config: Any) -> None:
    """Refuse every setting of the DeepSpeed configuration that does not go with SCAPE.

    Raises:
        ScapeConfigError: names the keys, their values and the remedies.
    """
    refuse_all(
        chain(
            _refused_zero(config),
            _refused_precision(config),
            _refused_checkpoints(config),
            _refused_features(config),
            _refused_leftovers(config),
        )
    )


def check_model(engine: Any) -> None:
    """Refuse a model or a way of distributing it that does not go with SCAPE.

    Raises:
        ScapeConfigError: names what it is, and the remedy.
    """
    refuse_all(_refused_parallelism(engine))


def _name_of(optimizer: Any) -> str:
    return optimizer.__name__ if hasattr(optimizer, "__name__") else type(optimizer).__name__


def _refused_zero(config: Any) -> Iterator[Refusal]:
    key = "zero_optimization"
    zero = config.zero_config
    stage = int(zero.stage)
    if stage not in (1, 2):
        why = "SCAPE works on ZeRO's partitions, and there are none" if stage == 0 else (
            "SCAPE partitions the optimizer, not the parameters"
        )  # fmt: skip
        given = (config._param_dict.get(key) or {}).get("stage")
        yield f"{key}.stage", None if given is None else stage, why, f'write "{key}": {{"stage": 2}}, or 1'
    for part in ("offload_optimizer", "offload_param"):
        offload = getattr(zero, part, None)
        device = getattr(offload, "device", None)
        if getattr(device, "value", device) not in (None, "none"):
            yield f"{key}.{part}.device", str(getattr(device, "value", device)), "offload is not supported", "remove it"
    if getattr(zero, "round_robin_gradients", False):
        problem = "DeepSpeed's own round-robin mapping is wrong at 3 and more ranks"
        yield f"{key}.round_robin_gradients", True, problem, "set it to false"
    for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if getattr(zero, name, False):
            yield f"{key}.{name}", True, "only stage 3 quantizes; here it would do nothing", "remove it"
    if getattr(zero, "zero_hpz_partition_size", 1) > 1:
        size = zero.zero_hpz_partition_size
        yield f"{key}.zero_hpz_partition_size", size, "only stage 3 has it; here it would do nothing", "remove it"
    if getattr(zero, "zenflow", None) is not None:
        yield f"{key}.zenflow", "set", "ZenFlow replaces the same optimizer steps", "remove it"
    if getattr(zero, "elastic_checkpoint", False):
        yield f"{key}.elastic_checkpoint", True, "residuals are not stored elastically", "set it to false"


def _refused_precision(config: Any) -> Iterator[Refusal]:
    for section in ("fp16", "bf16", "bfloat16"):  # read as written: an older DeepSpeed has no attribute for them
        part = config._param_dict.get(section) or {}
        for option in ("fp16_master_weights_and_grads", "bf16_master_weights_and_grads", "bf16_optimizer_states"):
            if part.get(option):
                yield f"{section}.{option}", True, "SCAPE keeps fp32 masters and moments", "set it to false"
    if getattr(config, "torch_autocast_enabled", False) and config.torch_autocast_dtype == torch.float16:
        yield (
            "torch_autocast.dtype",
            "float16",
            "its gradient scaler steps the optimizer itself",
            "use bfloat16 or fp16",
        )
    written = config._param_dict.get("communication_data_type")  # DeepSpeed sets the attribute itself at times
    if written is not None:
        remedy = "remove it and set optimizer.params.value_dtype"
        yield "communication_data_type", written, "SCAPE has its own reduce", remedy
    operation = config._param_dict.get("gradient_allreduce_op")  # which an older DeepSpeed does not read
    if operation not in ("mean", "avg", None):
        yield "gradient_allreduce_op", operation, "SCAPE averages gradients", "remove it"
    if getattr(config, "sparse_gradients_enabled", False):
        yield "sparse_gradients", True, "sparse embedding gradients are not supported", "set it to false"


def _refused_checkpoints(config: Any) -> Iterator[Refusal]:
    """Engines whose files are not whole, or cannot be read back, when save_checkpoint returns."""
    problem = "SCAPE seals a checkpoint when save_checkpoint returns, with DeepSpeed's plain writer only"
    written = config._param_dict.get("checkpoint") or {}
    if isinstance(written, dict) and written.get("writer") is not None:
        yield "checkpoint.writer", written["writer"], problem, "remove it"
    for section in ("datastates_ckpt", "nebula"):
        part = config._param_dict.get(section)
        if part and not (isinstance(part, dict) and part.get("enabled") is False):
            yield section, part, problem, "remove it"


def _refused_features(config: Any) -> Iterator[Refusal]:
    sequence_parallel = config._param_dict.get("sequence_parallel_size", 1)
    if sequence_parallel != 1:
        yield "sequence_parallel_size", sequence_parallel, "only data parallelism is supported", "set it to 1"
    if getattr(getattr(config, "compile_config", None), "deepcompile", False):
        yield "compile.deepcompile", True, "DeepCompile reduces gradients inside the graph", "set it to false"
    tensor_parallel = getattr(getattr(config, "tensor_parallel_config", None), "autotp_size", 0) or 0
    if tensor_parallel > 1:
        yield "tensor_parallel.autotp_size", tensor_parallel, "tensor parallelism is not supported", "set it to 0"
    if getattr(getattr(config, "expert_parallel_config", None), "enabled", False):
        yield "expert_parallel.enabled", True, "experts are not replicated on all ranks", "set it to false"


def _refused_leftovers(config: Any) -> Iterator[Refusal]:
    """Features that DeepSpeed has removed since (#8489): some write replicas, or leave them apart, behind our back."""
    problem = "DeepSpeed has removed it since, and SCAPE does without"
    for section in ("amp", "progressive_layer_drop", "quantize_training", "eigenvalue"):
        part = config._param_dict.get(section)
        if isinstance(part, dict) and part.get("enabled"):
            yield f"{section}.enabled", True, problem, "set it to false"
    if config._param_dict.get("compression_training"):
        yield "compression_training", config._param_dict["compression_training"], problem, "remove it"


def _refused_parallelism(engine: Any) -> Iterator[Refusal]:
    model = type(engine.module).__name__
    if engine.has_moe_layers or any(getattr(param, "allreduce", True) is False for param in engine.module.parameters()):
        yield "model", model, "experts are not replicated on all ranks", "use a dense model"
    if isinstance(engine.module, PipelineModule):
        yield "model", model, "pipeline parallelism is not supported", "pass a plain nn.Module"
    for kind in ("model", "tensor_model", "sequence", "pipe"):
        size = getattr(engine.mpu, f"get_{kind}_parallel_world_size", None)
        if size is not None and size() > 1:
            yield "mpu", f"{kind} parallel size {size()}", "only data parallelism is supported", "use size 1"
