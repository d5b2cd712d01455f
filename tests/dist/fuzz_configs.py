"""DeepSpeed configurations for SCAPE: good ones with one to three changes, most of them bad; a function of the seed."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

JUNK: list[Any] = ["yes", "auto", "1e-3", "", None, [], {}, [1], {"a": 1}, True, -1, 0, 1e300, 2.5, math.nan, math.inf]

# values that should train, and after them what may be junk for the key
PARAMS: dict[str, list[Any]] = {
    "lr": [0.0, 1e-3, 1, 1e-8],
    "betas": [[0.9, 0.95], [0.0, 0.0], [0.9], [0.9, 1.0], [0.9, 0.95, 0.99], ["a", "b"], [-0.1, 0.5], [True, 0.5]],
    "eps": [1e-8, 1e-30, 1.0, 0.0, -1e-8],
    "weight_decay": [0.0, 0.1, 1.5, 1e6, -0.1],
    "sparsity": [0.0, 0.5, 0.9, 0.99, 0.9999, 1.0, 1, -0.5, 0.1 + 0.2],
    "warmup_steps": [0, 2, 100, -1, 2.0, "2"],
    "normalizer": ["ema", "adams", "Adam"],
    "selection": ["partition", "block", "random"],
    "block_size": [2, 10, 100, 200, 1, 65536, 65537, 3],
    "residual_dtype": ["fp32", "bf16", "fp16", "float32"],
    "residual_device": ["device", "cpu", "cuda", "gpu"],
    "value_dtype": ["fp32", "bf16", "fp16", "torch.float32"],
    "overlap_comm": [True, False, "true", 1],
    "check_replicas": [0, 1, 2, -2, True],
    "timeout": [0, 30, 30.5, -1],
    "seed": [0, 7, -7],
}
UNKNOWN_PARAMS = [
    "sparsty",
    "density",
    "momentum",
    "weight_deca",
    "torch_adam",
    "betas2",
    "freeze_step",
    "",
    "LR",
    "max_grad_norm",
]

ZERO: dict[str, list[Any]] = {
    "stage": [1, 2, 0, 3, 4, "2", -1, 1.5],
    "overlap_comm": [True, False],
    "reduce_bucket_size": [1, 1000, 5e8, 0, -1, "auto"],
    "allgather_bucket_size": [1, 1000, 0, -5],
    "contiguous_gradients": [True, False],
    "reduce_scatter": [True, False],
    "allgather_partitions": [True, False],
    "use_multi_rank_bucket_allreduce": [True, False],
    "round_robin_gradients": [True, False],
    "ignore_unused_parameters": [True, False],
    "load_from_fp32_weights": [True, False],
    "elastic_checkpoint": [True, False],
    "compute_grad_norm": [True, False],
    "parameter_alignment": [True, False],
    "legacy_stage1": [True, False],
    "cpu_offload": [True, False],
    "cpu_offload_param": [True],
    "offload_optimizer": [
        {"device": "cpu"},
        {"device": "none"},
        {"device": "nvme", "nvme_path": "/tmp"},
        {"device": "gpu"},
    ],
    "offload_param": [{"device": "cpu"}, {"device": "none"}],
    "zenflow": [{"topk_ratio": 0.1}],
    "zero_quantized_gradients": [True, False],
    "zero_quantized_weights": [True, False],
    "zero_hpz_partition_size": [1, 2],
    "mics_shard_size": [1, 2, -1],
    "sub_group_size": [1, 100],
    "stage3_gather_16bit_weights_on_model_save": [True],
    "gather_16bit_weights_on_model_save": [True],
    "bucket_size": [5],
    "overlap_com": [True],
}
TOP: dict[str, list[Any]] = {
    "train_batch_size": [4, 8, 16, 7, 0, -8, "8", 8.0],
    "train_micro_batch_size_per_gpu": [1, 4, 0, -1, "4", 2.0],
    "gradient_accumulation_steps": [1, 2, 3, 0, -2, "2", 1.5],
    "gradient_clipping": [0.0, 1.0, 1e-6, 1e6, -1.0, "1.0"],
    "steps_per_print": [1, 10, None, 0, "10"],
    "prescale_gradients": [True, False],
    "gradient_predivide_factor": [1.0, 2.0, 0.0],
    "gradient_allreduce_op": ["mean", "sum", "max"],
    "sparse_gradients": [True, False],
    "communication_data_type": [None, "fp16", "fp32", "int8"],
    "seq_parallel_communication_data_type": ["fp32", "bf16"],
    "disable_allgather": [True, False],
    "check_overflow": [True, False],
    "zero_allow_untested_optimizer": [True, False],
    "zero_force_ds_cpu_optimizer": [True, False],
    "managed_gradient_accumulation": [True, False],
    "fp16": [
        {"enabled": True}, {"enabled": True, "loss_scale": 128}, {"enabled": True, "initial_scale_power": 4},
        {"enabled": False}, {"enabled": "maybe"}, {"enabled": True, "loss_scale": -1},
        {"enabled": True, "loss_scal": 1},
        {"enabled": True, "fp16_master_weights_and_grads": True}, {"enabled": True, "auto_cast": True},
        {"enabled": True, "hysteresis": 0}, {"enabled": True, "loss_scale_window": 0},
        {"enabled": True, "min_loss_scale": 0},
        {"enabled": True, "initial_scale_power": -3}, {"enabled": True, "initial_scale_power": 2000}, True,
    ],
    "bf16": [
        {"enabled": True}, {"enabled": False}, {"enabled": 3}, {"enabled": True, "immediate_grad_update": True},
        {"enabled": True, "bf16_master_weights_and_grads": True}, {"enabled": True, "bf16_optimizer_states": True},
        {"enabled": True, "check_grad_overflow": False}, {"enable": True}, {"enabled": True, "loss_scale": 4}, True,
    ],
    "data_types": [
        {"grad_accum_dtype": "fp32"}, {"grad_accum_dtype": "bf16"}, {"grad_accum_dtype": "fp16"},
        {"grad_accum_dtype": "int8"},
        {"grad_accum": "fp32"}, {"grad_accum_dtype": None}, {"param_dtype": "bf16"}, {"buffer_dtype": "fp32"},
        {"keep_in_fp32_modules": ["norm"]}, {"keep_in_fp32_modules": "norm"}, "fp32",
    ],
    "torch_autocast": [
        {"enabled": True}, {"enabled": True, "dtype": "bfloat16"}, {"enabled": True, "dtype": "float16"},
        {"enabled": True, "dtype": "fp8"}, {"enabled": False},
    ],
    "amp": [{"enabled": True}, {"enabled": False}, {"enabled": True, "opt_level": "O1"}],
    "scheduler": [
        {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, {"type": "WarmupLR", "params": {"warmup_steps": 5}},
        {"type": "WarmupDecayLR", "params": {"total_num_steps": 50}}, {"type": "WarmupDecayLR"}, {"type": "OneCycle"},
        {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}},
        {"type": "WarmupCosineLR", "params": {"total_num_steps": 50}}, {"type": "LRRangeTest"}, {"type": "Nope"},
        {"type": "StepLR", "params": {"step_size": 2}}, {"type": "CosineAnnealingLR", "params": {"T_max": "x"}},
        {"type": "LambdaLR"}, {"params": {}}, {"type": None}, "WarmupLR", {"type": "WarmupLR", "params": [1]},
    ],
    "elasticity": [{"enabled": True}, {"enabled": False},
                   {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [4], "min_gpus": 1, "max_gpus": 8,
                    "min_time": 1, "version": 0.1}],
    "checkpoint": [{"load_universal": True}, {"tag_validation": "Warn"}, {"tag_validation": "Maybe"},
                   {"load_universl": True},
                   {"writer": {"type": "FAST", "decoupled": True}}, {"use_node_local_storage": True},
                   {"load_universal": "yes"}, {"parallel_write": {"pipeline_stage": True}},
                   {"checkpoint_serialization": False}, [1]],
    "activation_checkpointing": [{"partition_activations": True}, {"cpu_checkpointing": True}, {"partition": 1}],
    "tensor_parallel": [{"autotp_size": 2}, {"autotp_size": 0}, {"autotp_size": 1}, {"autotp_size": "x"}],
    "expert_parallel": [{"enabled": True}, {"enabled": False}],
    "sequence_parallel_size": [1, 2, 0, "1"],
    "compile": [{"deepcompile": True}, {"deepcompile": False}, {"deep": True}],
    "hybrid_engine": [{"enabled": True}, {"enabled": False}],
    "compression_training": [{"weight_quantization": {"shared_parameters": {"enabled": True}}}, {}],
    "curriculum_learning": [{"enabled": True}, {"enabled": False}],
    "data_efficiency": [{"enabled": True}, {"enabled": False}],
    "progressive_layer_drop": [{"enabled": True, "theta": 0.5, "gamma": 0.01}, {"enabled": False}],
    "eigenvalue": [{"enabled": True}, {"enabled": False}],
    "quantize_training": [{"enabled": True}, {"enabled": False}],
    "flops_profiler": [{"enabled": True, "profile_step": 1}, {"enabled": False}, {"enable": True}],
    "wall_clock_breakdown": [True, False, "yes"],
    "memory_breakdown": [True, False],
    "dump_state": [True, False],
    "csv_monitor": [{"enabled": False}, {"enable": True}],
    "tensorboard": [{"enabled": False}],
    "comms_logger": [{"enabled": False}, {"enabled": True, "verbose": False}],
    "autotuning": [{"enabled": False}],
    "nebula": [{"enabled": True}, {"enabled": False}],
    "datastates_ckpt": [{"enabled": True}],
    "dataloader_drop_last": [True, False],
    "use_data_before_expert_parallelism": [True, False],
    "disable_python_gc": [True, False],
    "aio": [{"block_size": 1048576}, {"blocksize": 1}],
    "gradient_cliping": [1.0],
    "grad_accumulation_steps": [2],
    "zero_optimisation": [{"stage": 1}],
    "my_own_notes": ["hello", {"a": [1, 2]}],
    "optimizer": [
        {"type": "SCAPE"}, {"type": "Scape", "params": {}}, {"type": "scape"}, {"type": "SCAPE", "params": None},
        {"type": "SCAPE", "params": []}, {"type": "SCAPE", "param": {"lr": 1e-3}},
        {"type": "SCAPE", "legacy_fusion": True},
        {"type": "SCAP", "params": {"sparsity": 0.9}}, {"type": "ADAMS", "params": {"lr": 1e-3}},
        {"type": "AdamS", "params": {"lr": -1}},
        {"type": ["SCAPE"]}, {"params": {"sparsity": 0.9}}, "SCAPE",
    ],
}  # fmt: skip


def base(rng: random.Random) -> dict[str, Any]:
    """A configuration that trains."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": rng.choice([1, 2])},
        "optimizer": {"type": "SCAPE", "params": {"lr": 1e-3, "sparsity": rng.choice([0.5, 0.9, 0.99])}},
    }
    dtype = rng.choice(["fp32", "fp32", "bf16", "fp16"])
    if dtype != "fp32":
        settings[dtype] = {"enabled": True}
    return settings


def change(settings: dict[str, Any], rng: random.Random) -> None:
    """Set one key somewhere to a value of its list, or to junk."""
    where = rng.choices(["params", "unknown", "zero", "top"], [5, 1, 4, 8])[0]
    junk = rng.random() < 0.2
    if where in ("zero",):
        section = settings.get("zero_optimization")
        table: dict[str, list[Any]] = ZERO
    elif where == "top":
        section, table = settings, TOP
    else:
        optimizer = settings.get("optimizer")
        section = optimizer.setdefault("params", {}) if isinstance(optimizer, dict) else None
        table = PARAMS
    if not isinstance(section, dict):
        return
    if where == "unknown":
        section[rng.choice(UNKNOWN_PARAMS)] = rng.choice([1, "x", None])
        return
    key = rng.choice(sorted(table))
    section[key] = copy.deepcopy(rng.choice(JUNK if junk else table[key]))


def build(number: int) -> dict[str, Any]:
    """Configuration ``number``; every value of every table comes once before chance takes over."""
    rng = random.Random(number)
    settings = base(rng)
    single = singles()
    if number < len(single):
        where, key, value = single[number]
        section = {"params": settings["optimizer"]["params"], "zero": settings["zero_optimization"], "top": settings}[
            where
        ]
        section[key] = copy.deepcopy(value)
        return settings
    for _ in range(rng.choice([1, 2, 2, 3])):
        change(settings, rng)
    return settings


def singles() -> list[tuple[str, str, Any]]:
    tables = {"params": PARAMS, "zero": ZERO, "top": TOP}
    return [(where, key, value) for where, table in tables.items() for key, values in table.items() for value in values]
