"""Ranks of test_switch.py: every shipped configuration stepped, and every bad one refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests import worker

ROOT = Path(__file__).resolve().parents[2]


def step_configs(rank: int) -> dict[str, Any]:
    """Three steps of each file in ds_configs/."""
    from tests.dist import tiny

    out = {}
    for path in sorted((ROOT / "ds_configs").glob("*.json")):
        settings = json.loads(path.read_text())
        engine = tiny.start(settings)
        losses = [tiny.train_step(engine, step, rank) for step in range(3)]
        inner = engine.optimizer.optimizer if hasattr(engine.optimizer, "optimizer") else engine.optimizer
        same = [torch.empty_like(engine.module.up.weight) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(same, engine.module.up.weight.data)
        out[path.stem] = {
            "wrapper": type(engine.optimizer).__name__,
            "inner": type(inner).__name__,
            "dtype": str(engine.module.up.weight.dtype),
            "stage": engine.zero_optimization_stage(),
            "finite": all(loss == loss and loss < 20 for loss in losses),
            "equal": all(torch.equal(s, same[0]) for s in same),
        }
        engine.destroy()
    return out


def bad_cases() -> dict[str, tuple[dict[str, Any], str]]:
    """Configuration (merged over a good one) and the key that the error must name."""

    def params(**p: Any) -> dict[str, Any]:
        return {"optimizer": {"type": "SCAPE", "params": {"lr": 1e-3, **p}}}

    def zero(**z: Any) -> dict[str, Any]:
        return {"zero_optimization": {"stage": 2, **z}}

    from deepspeed_scape import older

    autocast = "torch_autocast.dtype" if older.knows("torch_autocast") else "torch_autocast"  # ignored as a whole
    return {
        "unknown": (params(sparsty=0.9), "optimizer.params.sparsty"),
        "range": (params(sparsity=1.0), "optimizer.params.sparsity"),
        "type": (params(warmup_steps="10"), "optimizer.params.warmup_steps"),
        "auto": (params(lr="auto"), "optimizer.params.lr"),
        "eps": (params(eps=0.0), "optimizer.params.eps"),
        "betas": (params(betas=[0.9, 1.0]), "optimizer.params.betas"),
        "decay": (params(lr=1.0, weight_decay=1.5), "lr * weight_decay"),
        "block": (params(selection="block", block_size=250), "block_size"),
        "adams": ({"optimizer": {"type": "AdamS", "params": {"sparsity": 0.9}}}, "optimizer.params.sparsity"),
        "adamw": (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "sparsity": 0.9, "torch_adam": True}}},
            "optimizer.params.sparsity",
        ),
        "stage0": (zero(stage=0), "zero_optimization.stage = 0"),
        "stage3": (zero(stage=3), "zero_optimization.stage = 3"),
        "offload": (zero(offload_optimizer={"device": "cpu"}), "zero_optimization.offload_optimizer.device"),
        "round_robin": (zero(round_robin_gradients=True), "zero_optimization.round_robin_gradients"),
        "elastic": (zero(elastic_checkpoint=True), "zero_optimization.elastic_checkpoint"),
        "zenflow": (zero(zenflow={"topk_ratio": 0.1}), "zero_optimization.zenflow"),
        "masters": (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "bf16.bf16_master_weights_and_grads",
        ),
        "autocast": ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, autocast),
        "comm_dtype": ({"communication_data_type": "fp32"}, "communication_data_type"),
        "sum": ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        "tensor_parallel": ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size"),
        "deepcompile": ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
        "sequence": ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        "amp": ({"amp": {"enabled": True}}, ""),  # DeepSpeed's own words where it has removed the key
        "quantize": ({"quantize_training": {"enabled": True}}, "quantize_training"),
        "writer": ({"checkpoint": {"writer": {"type": "FAST", "decoupled": True}}}, "checkpoint.writer"),
    }


def expert_model() -> torch.nn.Module:
    from deepspeed.moe.layer import MoE

    return torch.nn.Sequential(torch.nn.Linear(4, 4), MoE(hidden_size=4, expert=torch.nn.Linear(4, 4), num_experts=2))


def pipeline_model() -> torch.nn.Module:
    from deepspeed.pipe import PipelineModule

    return PipelineModule([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)], num_stages=1, loss_fn=torch.nn.MSELoss())


def refuse(rank: int) -> dict[str, str]:
    from tests.dist import tiny

    said = {}
    for name, (change, _) in bad_cases().items():
        said[name] = worker.error_of(lambda change=change: tiny.start(tiny.config(top=change)))
    model = tiny.TinyNet()
    client = torch.optim.AdamW(model.parameters())
    said["client"] = worker.error_of(lambda: tiny.start(tiny.config(), model, optimizer=client))
    frozen = tiny.TinyNet().requires_grad_(False)
    said["frozen"] = worker.error_of(lambda: tiny.start(tiny.config(), frozen, list(frozen.parameters())))
    said["scheduler"] = worker.error_of(lambda: half_frozen_with_scheduler())
    said["experts"] = worker.error_of(lambda: tiny.start(tiny.config(), expert_model()))
    for lacking in (0, 1):
        said[f"module on rank {lacking}"] = without_module(rank == lacking)
    said["pipeline"] = worker.error_of(lambda: tiny.start(tiny.config(stage=1), pipeline_model()))
    return said


def without_module(lacks: bool) -> str:
    """What is said where a rank lacks the module of a monitor that the JSON asks for."""
    from deepspeed.runtime import engine

    from deepspeed_scape import document
    from tests.dist import tiny

    find_spec, monitor = document.find_spec, engine.MonitorMaster
    document.find_spec = lambda module: None if lacks else object()
    engine.MonitorMaster = lambda config: SimpleNamespace(enabled=False)
    try:
        return worker.error_of(lambda: tiny.start(tiny.config(top={"comet": {"enabled": True}})).destroy())
    finally:
        document.find_spec, engine.MonitorMaster = find_spec, monitor


def half_frozen_with_scheduler() -> Any:
    """A scheduler that has counted a frozen group, which DeepSpeed cannot flatten."""
    from deepspeed_scape import Scape
    from tests.dist import tiny

    model = tiny.TinyNet()
    model.embed.requires_grad_(False)
    rest = [p for p in model.parameters() if p.requires_grad]
    optimizer = Scape([{"params": list(model.embed.parameters()), "lr": 1e-5}, {"params": rest, "lr": 1e-2}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    settings = tiny.config()
    del settings["optimizer"]
    return tiny.start(settings, model, optimizer=optimizer, lr_scheduler=scheduler)


def client_optimizer(rank: int) -> list[float]:
    """Our class passed by the script itself, without an optimizer section in the JSON."""
    import deepspeed_scape
    from tests.dist import tiny

    model = tiny.TinyNet()
    settings = tiny.config()
    del settings["optimizer"]
    optimizer = deepspeed_scape.Scape(model.parameters(), lr=3e-3, sparsity=0.9, warmup_steps=0)
    engine = tiny.start(settings, model, optimizer=optimizer)
    losses = [tiny.train_step(engine, step, rank) for step in range(40)]
    kind = type(engine.optimizer).__name__
    engine.destroy()
    return [kind == "ScapeZeroOptimizer", sum(losses[:5]) / 5, sum(losses[-5:]) / 5]


def main() -> None:
    rank, _ = worker.init()
    worker.report({"configs": step_configs(rank), "refused": refuse(rank), "client": client_optimizer(rank)})


if __name__ == "__main__":
    main()
