"""One rank's optimizer without an engine: the real step of `ScapeZeroOptimizer` on gradients that a test makes up.

A world of one: there is nobody to talk to, so every part of a step runs but the collectives.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_scape.buffers import WireBuffers
from deepspeed_scape.config import ScapeOptions
from deepspeed_scape.diagnostics import Diagnostics
from deepspeed_scape.exchange import Exchange
from deepspeed_scape.faults import Roster
from deepspeed_scape.group import ScapeGroup
from deepspeed_scape.layout import group_layout, locate
from deepspeed_scape.norms import GradientNorms
from deepspeed_scape.optimizer import Scape
from deepspeed_scape.stopwatch import Stopwatch


def join_world_of_one(device: torch.device) -> None:
    """Make the default process group: gloo on a CPU, NCCL on a GPU."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def build(sizes: list[list[int]], device: torch.device, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """An optimizer over parameters of these sizes, group by group, with values between -1 and 1.

    Groups have weight decay, the first 0.1 and the others 0, as in a usual training script. There are no dense steps
    first, unless ``options`` ask for some.
    """
    from deepspeed_scape.zero import ScapeZeroOptimizer

    chosen = ScapeOptions(**{"warmup_steps": 0, **options})
    generator = torch.Generator().manual_seed(0)
    bare: Any = object.__new__(ScapeZeroOptimizer)
    bare.options, bare.clip_grad, bare.monitor = chosen, 1.0, None
    bare.custom_loss_scaler, bare.external_loss_scale = True, 1.0
    bare._update_scale = lambda overflow: None
    bare.exchange = Exchange(dist.group.WORLD, device, chosen.overlap_comm)
    bare.bit16_groups, masters, flats = [], [], []
    for group in sizes:
        numel = sum(group)
        flat = (torch.rand(numel, generator=generator) * 2 - 1).to(dtype).to(device)
        bare.bit16_groups.append([part.requires_grad_(False) for part in flat.split(group)])
        flats.append(flat)
        masters.append(flat.float())
    scape = Scape(
        [{"params": [m], "weight_decay": 0.0 if i else 0.1} for i, m in enumerate(masters)], **chosen.model_dump()
    )
    for master in masters:
        zeros = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
        scape.state[master] = {"step": torch.zeros(()), **zeros}
    bare.optimizer = scape
    bare.scape_groups = []
    for i, (flat, params, master) in enumerate(zip(flats, bare.bit16_groups, masters, strict=True)):
        layout = group_layout(locate(params, [f"p{i}.{n}" for n in range(len(params))], flat), flat.numel(), 1, chosen)
        bare.scape_groups.append(
            ScapeGroup(layout=layout, options=chosen, optimizer=scape, number=i, flat=flat, master=master, rank=0)
        )
    bare.wire = WireBuffers(bare.scape_groups, 1, chosen.value_torch_dtype)
    bare.norms = GradientNorms(1)
    bare.diagnostics = Diagnostics(bare.scape_groups, chosen.diagnostics_every, 1)
    bare.applied_steps, bare.visits, bare.step_stats, bare._gradients_wait = 0, 0.0, {}, False
    bare._gradients_taken = False
    bare.stopwatch, bare.roster = Stopwatch(device), Roster(dist.group.WORLD)
    bare.zero_grad = lambda set_to_none=True: _drop_gradients(bare)
    bare.loss_scaler = SimpleNamespace(cur_scale=1.0)
    return bare


def _drop_gradients(bare: Any) -> None:
    for group in bare.bit16_groups:
        for param in group:
            param.grad_accum = None


def give_gradients(bare: Any, step: int) -> None:
    """Gradients of the parameters' dtype, the same on every device; the last parameter of a group has none."""
    for g, group in enumerate(bare.bit16_groups):
        for n, param in enumerate(group[:-1] if len(group) > 1 else group):
            generator = torch.Generator().manual_seed(1000 * step + 10 * g + n)
            grad = torch.randn(param.shape, generator=generator) * torch.rand(param.shape, generator=generator)
            param.grad_accum = grad.to(param.dtype).to(param.device)


def state(bare: Any) -> list[torch.Tensor]:
    """Everything that a step changes, group by group, on the CPU."""
    bare.finish_mask()
    tensors = []
    for group in bare.scape_groups:
        masks = torch.empty(0) if group.position is None else group.masks()
        tensors += [group.flat, group.master, group.residual.state(), group.last, masks]
        tensors += [group.moments["exp_avg"], group.moments["exp_avg_sq"]]
    return [tensor.detach().cpu().clone() for tensor in tensors]
