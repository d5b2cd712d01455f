"""Ranks of test_users_pain.py: each function replays what went wrong for somebody, and returns what came out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import worker


def replicas_equal(engine: Any) -> bool:
    flat = torch.cat([group.flat.float() for group in engine.optimizer.scape_groups])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(other, everyone[0]) for other in everyone)


def poison_once(engine: Any, step: int, value: float, rank: int) -> None:
    from tests.dist import odd_model

    hook = engine.module.up.weight.register_hook(lambda grad: grad * value if rank == 0 else grad)
    odd_model.train_step(engine, step)
    hook.remove()


def overflow(rank: int, folder: Path) -> dict[str, Any]:
    from tests.dist import odd_model
    from tests.dist.rank_checkpoint import digest

    out = {}
    for dtype in ("fp16", "bf16", "fp32"):
        engine = odd_model.build({"stage": 2, "dtype": dtype, "params": {"sparsity": 0.9}})
        for step in range(4):
            odd_model.train_step(engine, step)
        before, lr = digest(engine), engine.get_lr()
        scheduled = engine.lr_scheduler.last_batch_iteration
        poison_once(engine, 4, float("inf"), rank)
        out[dtype] = {
            "same": digest(engine) == before, "skipped": engine.skipped_steps, "lr": engine.get_lr() == lr,
            "schedule": engine.lr_scheduler.last_batch_iteration == scheduled,
            "told": engine.optimizer.overflow, "norm": str(float(engine.optimizer._global_grad_norm)),
        }  # fmt: skip
        engine.destroy()
    return out


def accumulation(rank: int, folder: Path) -> dict[str, Any]:
    """The masters after 12 dense steps of one sum, cut into 1, 2 and 4 micro-steps, at both stages."""
    from tests.dist import tiny

    found = {}
    for stage in (1, 2):
        for micros in (1, 2, 4):
            top = {"gradient_accumulation_steps": micros, "train_micro_batch_size_per_gpu": 8 // micros}
            settings = tiny.config(stage, top=top, sparsity=0.0)
            engine = tiny.start(settings)
            for step in range(12):
                whole = tiny.batch(step, rank, 0, 8)
                for part in whole.chunk(micros):
                    engine.backward(engine(part))
                    engine.step()
            found[f"{stage}-{micros}"] = float(engine.optimizer.scape_groups[0].master.double().norm())
            engine.destroy()
    return found


def no_sync(rank: int, folder: Path) -> dict[str, Any]:
    from tests.dist import tiny

    engine = tiny.start(tiny.config(1, sparsity=0.5))
    try:
        with engine.no_sync():
            engine.backward(engine(tiny.batch(0, rank)))
        engine.backward(engine(tiny.batch(0, rank, 1)))
        engine.step()
        said = "trained"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    equal = replicas_equal(engine)
    engine.destroy()
    return {"said": said, "equal": equal}


def tied(rank: int, folder: Path) -> dict[str, Any]:
    """The gradient of a tied weight against torch's own, over both uses."""
    from tests.dist import odd_model

    engine = odd_model.build({"stage": 2, "dtype": "fp32", "params": {"sparsity": 0.0},
                              "top": {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}})  # fmt: skip
    plain = odd_model.OddNet()
    pairs = odd_model.rows(0, 0, rank, dist.get_world_size())
    plain(pairs).backward()
    wanted = plain.embed.weight.grad.clone()
    dist.all_reduce(wanted)
    wanted /= dist.get_world_size()
    engine.backward(engine(pairs))
    from deepspeed.utils import safe_get_full_grad

    got = safe_get_full_grad(engine.module.embed.weight)
    count = sum(name in ("embed.weight", "decode.weight") for g in engine.optimizer.scape_groups for name in
                (slot.name for slot in g.layout.slots))  # fmt: skip
    engine.step()
    engine.destroy()
    return {"difference": float((got - wanted).abs().max()), "times": count}


def groups_and_rates(rank: int, folder: Path) -> dict[str, Any]:
    """A frozen group first, an empty one in the middle, a group smaller than the world: whose rate is whose?"""
    from tests.dist import odd_model, tiny

    model = odd_model.OddNet()
    groups = [
        {"params": list(model.fixed.parameters()), "lr": 0.5},
        {"params": [model.gain], "lr": 0.0},
        {"params": [], "lr": 0.7},
        {"params": [model.empty], "lr": 0.9},
        {"params": [model.up.weight, model.embed.weight, model.unused], "lr": 1e-2},
    ]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = tiny.config(2, sparsity=0.0, top={"gradient_accumulation_steps": 1})
    engine = tiny.start(settings, model, groups)
    pairs = odd_model.rows(0, 0, rank, dist.get_world_size())
    engine.backward(engine(pairs))
    engine.step()
    moved = {
        name: float((value - before[name]).abs().max()) for name, value in model.state_dict().items() if value.numel()
    }
    equal = replicas_equal(engine)
    engine.destroy()
    return {"moved": moved, "equal": equal}


def weights_only(rank: int, folder: Path) -> dict[str, Any]:
    """After a load of weights alone the masters are the loaded weights, not the old ones."""
    from tests.dist import odd_model

    case = {"stage": 1, "dtype": "bf16", "params": {"sparsity": 0.9}}
    engine = odd_model.build(case)
    for step in range(3):
        odd_model.train_step(engine, step)
    engine.save_checkpoint(str(folder / "weights"), tag="t")
    saved = {name: value.clone() for name, value in engine.module.state_dict().items()}
    moments = {key: str(value.dtype) for key, value in engine.optimizer.scape_groups[0].moments.items()}
    engine.destroy()
    engine = odd_model.build(case, seed=3)
    odd_model.train_step(engine, 0)
    engine.load_checkpoint(str(folder / "weights"), tag="t", load_optimizer_states=False)
    masters = all(
        torch.equal(g.master.data.bfloat16(), g.flat[g.rank * g.layout.partition_size :][: g.layout.partition_size])
        for g in engine.optimizer.scape_groups
    )
    loaded = all(torch.equal(value, saved[name]) for name, value in engine.module.state_dict().items())
    engine.load_checkpoint(str(folder / "weights"), tag="t")
    again = {key: str(value.dtype) for key, value in engine.optimizer.scape_groups[0].moments.items()}
    odd_model.train_step(engine, 5)
    stays = float((engine.module.up.weight - saved["up.weight"]).float().abs().max())
    engine.destroy()
    return {"masters": masters, "loaded": loaded, "moments": moments, "again": again, "stays": stays}


def clients(rank: int, folder: Path) -> dict[str, Any]:
    """An optimizer object, and a function that makes one, from the script."""
    from deepspeed_scape import Scape
    from tests.dist import tiny

    out = {}
    for name in ("object", "function"):
        model = tiny.TinyNet()
        settings = tiny.config()
        del settings["optimizer"]
        make = lambda params: Scape(params, lr=3e-3, sparsity=0.9, warmup_steps=0)  # noqa: E731
        optimizer = make(model.parameters()) if name == "object" else make
        engine = tiny.start(settings, model, optimizer=optimizer)
        losses = [tiny.train_step(engine, step, rank) for step in range(30)]
        out[name] = [type(engine.optimizer).__name__, losses[-1] < losses[0], replicas_equal(engine)]
        engine.destroy()
    return out


def clip_norm(rank: int, folder: Path) -> dict[str, Any]:
    """Gradients far above the clip: what is reported, and how much of it reached the first moment."""
    from tests.dist import tiny

    out = {}
    for sparsity in (0.0, 0.9):
        for clip in (0.0, 0.01):
            settings = tiny.config(2, top={"gradient_clipping": clip}, sparsity=sparsity, betas=[0.9, 0.95])
            engine = tiny.start(settings)
            plain = tiny.TinyNet()
            shared = tiny.batch(0, 0)  # the same rows everywhere, so that the estimate is exact
            plain(shared).backward()
            whole = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
            engine.backward(engine(shared))
            engine.step()
            taken = sum(g.moments["exp_avg"].double().square().sum() for g in engine.optimizer.scape_groups)
            dist.all_reduce(taken)
            out[f"{sparsity}-{clip}"] = {
                "reported": engine.get_global_grad_norm() / float(whole),
                "taken": float(taken.sqrt()) / (1 - 0.9) / float(whole),
                "clip": clip / float(whole),
                "coefficient": engine.optimizer.step_stats["clip_coefficient"],
            }
            engine.destroy()
    return out


def wandb_config(rank: int, folder: Path) -> dict[str, Any]:
    """DeepSpeed's own W&B monitor, offline."""
    from deepspeed_scape import ScapeConfigError
    from tests.dist import tiny

    os.environ["WANDB_DIR"] = str(folder)
    settings = tiny.config(2, sparsity=0.9, top={"wandb": {"enabled": True, "project": "pain"}})
    try:
        engine = tiny.start(settings)
    except ScapeConfigError as error:  # DeepSpeed 0.16.9 beside a wandb of today
        return {"refused": str(error)}
    tiny.train_step(engine, 0, rank)
    engine.destroy()
    if rank == 0:
        import wandb

        wandb.finish()
    return {"settings": settings}


def main() -> None:
    folder = Path(worker.args()[0])
    rank, _ = worker.init()
    checks = (
        overflow, accumulation, no_sync, tied, groups_and_rates, weights_only, clients, clip_norm, wandb_config,
    )  # fmt: skip
    report = {check.__name__: check(rank, folder) for check in checks}
    report["imports"] = sorted(name for name in sys.modules if "onebit" in name or "zoadam" in name)
    worker.report(report)


if __name__ == "__main__":
    main()
