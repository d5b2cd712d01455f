"""The ranks of one SCAPE run, simulated in one process: DESIGN section 1 written down line by line.

Plain torch, no process group, no overlap, nothing clever: this is what the distributed optimizer is compared with, so
it shares no code with `deepspeed_scape`. Letters as in the design: P flat elements of a group (padded), W ranks,
S = P/W, K elements synchronised per partition, t the optimizer step. Every per-owner state is held as the (P,)
concatenation of the W partitions.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class GroupSpec:
    """One parameter group: initial fp32 values in flat order, and its hyper-parameters."""

    params: list[Tensor]
    lr: float = 1e-3
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8


def keep_count(size: int, density: float) -> int:
    """How many of `size` elements a mask keeps: half up, at least one, at most all."""
    return min(size, max(1, int(density * size + 0.5)))


def top_k(score: Tensor, k: int) -> Tensor:
    """Indices (int64, ascending) of the k largest scores; equal scores go to the lowest index."""
    return torch.sort(score, descending=True, stable=True).indices[:k].sort().values


def first_moment_factors(b1: float, steps: Tensor) -> tuple[Tensor, Tensor]:
    """b1^D and c = b1 (1 - b1^D) / (1 - b1), both fp32, powers in fp64."""
    power = torch.pow(torch.tensor(b1, dtype=torch.float64), steps.double())
    return power.float(), (b1 * (1 - power) / (1 - b1)).float()


class Simulation:
    """W ranks in lockstep; `step` takes every rank's own, unscaled gradients."""

    def __init__(
        self,
        groups: list[GroupSpec],
        world_size: int,
        sparsity: float,
        normalizer: str = "ema",
        selection: str = "partition",
        block_size: int = 200,
        warmup_steps: int = 0,
        value_dtype: torch.dtype = torch.float32,
        residual_dtype: torch.dtype = torch.float32,
        model_dtype: torch.dtype = torch.float32,
        clip_grad: float = 0.0,
        ballots: bool = False,
    ) -> None:
        if normalizer not in ("ema", "adams"):
            raise ValueError(f"normalizer={normalizer!r}: 'ema' or 'adams'")
        if selection not in ("partition", "block"):
            raise ValueError(f"selection={selection!r}: 'partition' or 'block'")
        if selection == "block" and int((1 - sparsity) * block_size + 0.5) < 1:
            raise ValueError(f"block_size={block_size} keeps nothing of a block at sparsity={sparsity}")
        self.groups, self.W, self.sparsity, self.density = groups, world_size, sparsity, 1 - sparsity
        self.normalizer, self.selection, self.block_size = normalizer, selection, block_size
        self.warmup_steps, self.clip_grad, self.ballots = warmup_steps, clip_grad, ballots
        self.value_dtype, self.residual_dtype, self.model_dtype = value_dtype, residual_dtype, model_dtype

        self.t = 0
        self.rho = 1.0  # noise ratio of the last synchronised buffer
        # DeepSpeed takes the masters from the model, so they start at values the model's dtype can hold.
        self.replica = [self.flatten(group.params).to(model_dtype) for group in groups]  # (P,) same on all ranks
        self.master = [flat.float() for flat in self.replica]  # (P,) fp32
        self.m = [torch.zeros_like(w) for w in self.master]  # (P,) fp32, exp_avg
        self.v = [torch.zeros_like(w) for w in self.master]  # (P,) fp32, exp_avg_sq
        self.last = [torch.zeros_like(w, dtype=torch.int32) for w in self.master]  # (P,)
        self.residual = [
            [torch.zeros_like(w, dtype=residual_dtype) for w in self.master] for _ in range(world_size)
        ]  # [rank][group] (P,)
        self.masks: list[Tensor | None] = [None] * len(groups)  # (W, K) for the next step; None: no late mask
        self.votes = ballots and world_size > 1  # then an owner's residual is nearly the sum over the ranks
        self.log_decay = [[0.0] for _ in groups]  # [group][t] sum over tau <= t of log(1 - lr_tau wd), fp64

    # ---- layout -------------------------------------------------------------------------------------------------

    def flatten(self, tensors: list[Tensor]) -> Tensor:
        """(P,) fp32: the tensors in order, zeros at the end up to a multiple of 2 W."""
        flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors] + [torch.zeros(0)])
        return torch.nn.functional.pad(flat, (0, -flat.numel() % (2 * self.W)))

    def partition_size(self, group: int) -> int:
        """S."""
        return self.master[group].numel() // self.W

    def partition(self, flat: Tensor, rank: int) -> Tensor:
        """The (S,) view of a (P,) tensor that `rank` owns."""
        size = flat.numel() // self.W
        return flat[rank * size : (rank + 1) * size]

    def parameters(self, group: int) -> list[Tensor]:
        """The replica's values in the model's dtype, in the shapes of the group's parameters."""
        out, offset = [], 0
        for param in self.groups[group].params:
            out.append(self.replica[group][offset : offset + param.numel()].view(param.shape).clone())
            offset += param.numel()
        return out

    # ---- one step -----------------------------------------------------------------------------------------------

    def step(self, grads: list[list[list[Tensor]]], lrs: list[float] | None = None) -> dict[str, Any]:
        """One optimizer step from grads[rank][group][param]; says what happened.

        Keys: `skipped`; else `rms` (root mean square over ranks of ||g_i||), `norm` (its estimate of ||mean g||),
        `rho` (the noise ratio in that estimate), `clip`, and per group `masks` (W, K) int64 and `R` (W, K) fp32.
        """
        flat = [[self.flatten(tensors) for tensors in rank_grads] for rank_grads in grads]  # [rank][group] (P,)
        squares = sum(float(g.double().square().sum()) for rank_flat in flat for g in rank_flat)
        if not math.isfinite(squares):
            return {"skipped": True}

        self.t += 1
        rms, rho = math.sqrt(squares / self.W), self.rho
        norm = rms * math.sqrt(rho)
        clip = min(1.0, self.clip_grad / (norm + 1e-6)) if self.clip_grad > 0 else 1.0
        lrs = [group.lr for group in self.groups] if lrs is None else lrs

        masks, means = [], []
        mean_square, square_mean = 0.0, 0.0  # sums over owners and groups: mean_i ||x_i||^2, ||mean x||^2
        voting = self.votes and self.sparsity > 0 and self.t > self.warmup_steps
        for g, lr in enumerate(lrs):
            self.log_decay[g].append(self.log_decay[g][-1] + math.log1p(-lr * self.groups[g].weight_decay))
            grown = []  # by owner, (S,): what this step added to its residual in its own partition
            for rank in range(self.W):
                residual = self.residual[rank][g]
                before = self.partition(residual, rank).float().clone()
                residual.copy_(residual.float() + clip * flat[rank][g])
                grown.append(self.partition(residual, rank).float() - before)
            mask = self.mask_in_use(g)
            mean = []
            for owner in range(self.W):
                D = (self.t - self.partition(self.last[g], owner))[mask[owner]]
                x = self.pack(g, owner, mask[owner])  # (W, K)
                mean.append(torch.sum(x, dim=0) / self.W)
                if voting:
                    mean_of_one, of_one = self.newest(grown[owner][mask[owner]], mean[-1], D)
                    square_mean += mean_of_one
                    mean_square += of_one
                else:
                    mean_square += float(x.double().square().sum()) / self.W
                    square_mean += float(mean[-1].double().square().sum())
                self.update(g, owner, mask[owner], mean[-1], lr)
            if voting:
                self.vote(g)
            self.masks[g] = self.make_mask(g) if self.sparsity > 0 and self.t >= self.warmup_steps else None
            masks.append(mask)
            means.append(torch.stack(mean))
        self.rho = min(1.0, max(1 / self.W, square_mean / mean_square)) if mean_square > 0 else 1.0
        return {"skipped": False, "rms": rms, "norm": norm, "rho": rho, "clip": clip, "masks": masks, "R": means}

    def mask_in_use(self, g: int) -> Tensor:  # (W, K) int64
        """Everything on a dense step, else the mask made one step ago, else one made now."""
        if self.sparsity == 0 or self.t <= self.warmup_steps:
            return torch.arange(self.partition_size(g)).repeat(self.W, 1)
        late = self.masks[g]
        return self.make_mask(g) if late is None else late

    def pack(self, g: int, owner: int, index: Tensor) -> Tensor:  # (K,) -> (W, K) fp32
        """Take the owner's masked entries out of every rank's residual; what the wire makes of them."""
        x = []
        for rank in range(self.W):
            mine = self.partition(self.residual[rank][g], owner)
            x.append(mine[index].to(self.value_dtype).float())
            mine[index] = 0
        return torch.stack(x)

    def update(self, g: int, owner: int, index: Tensor, R: Tensor, lr: float) -> None:
        """The owner's update of its K masked elements, and the gather of them into the replicas."""
        (b1, b2), eps = self.groups[g].betas, self.groups[g].eps
        state = [self.partition(flat[g], owner) for flat in (self.master, self.m, self.v, self.last, self.replica)]
        w, m, v, last = (part[index] for part in state[:4])

        D = self.t - last
        b1_D, c = first_moment_factors(b1, D)
        U = (1 - c / D) * R + c * m
        s2 = R * R / D
        if self.normalizer == "adams":
            v = b2 * m * m + (1 - b2) * s2
            d = v.sqrt() + eps
        else:
            B = torch.pow(torch.tensor(b2, dtype=torch.float64), D.double()).clamp(min=0.9).float()
            v = torch.where(last == 0, s2, B * v + (1 - B) * s2)
            d = (v * (b2 * (1 - b1) / (1 + b1) + 1 - b2)).sqrt() + eps
        log_decay = torch.tensor(self.log_decay[g], dtype=torch.float64)
        decay = torch.exp(log_decay[self.t] - log_decay[last.long()]).float()
        w = w * decay - lr * U / d
        m = b1_D * m + (1 - b1_D) / D * R

        for part, new in zip(state, (w, m, v, torch.full_like(last, self.t), w.to(self.model_dtype)), strict=True):
            part[index] = new

    # ---- ballots (DESIGN section 6) ---------------------------------------------------------------------------------

    def newest(self, own: Tensor, R: Tensor, D: Tensor) -> tuple[float, float]:
        """||mean g||^2 and ||g||^2 of one step's gradients, from the owner's own and what all gathered in D steps."""
        g = own.double()
        others = R.double() * self.W - g  # the sum of W D - 1 gradients
        signal, square = float((g * others / (self.W * D.double() - 1)).sum()), float((g * g).sum())
        return signal + (square - signal) / self.W, square

    def vote(self, g: int) -> None:
        """Every rank moves sign * mean magnitude of its largest unsent gradients into their owner's residual."""
        kept = self.select(torch.zeros(self.partition_size(g))).numel()  # K
        for owner in range(self.W):
            owners = self.partition(self.residual[owner][g], owner)
            total = owners.float().clone()
            for rank in range(self.W):
                if rank != owner:
                    r = self.partition(self.residual[rank][g], owner)
                    named = top_k(r.float().abs(), kept - kept // 64)
                    a = r[named].float().abs().mean()
                    moved = torch.where(r[named] < 0, -a, a)
                    r[named] = (r[named].float() - moved).to(r.dtype)
                    total[named] += moved
            owners.copy_(total)

    # ---- the next mask ------------------------------------------------------------------------------------------

    def make_mask(self, g: int) -> Tensor:  # (W, K) int64
        """Every owner's selection from its own residual."""
        mask = torch.stack([self.select(self.score(g, owner)) for owner in range(self.W)])
        return mask

    def score(self, g: int, owner: int) -> Tensor:  # (S,) fp32
        """|the pending first moment| of the owner's partition, from the owner's own residual."""
        r = self.partition(self.residual[owner][g], owner).float() / (self.W if self.votes else 1)
        m = self.partition(self.m[g], owner)
        D = (self.t - self.partition(self.last[g], owner)).clamp(min=1)
        _, c = first_moment_factors(self.groups[g].betas[0], D)
        return ((1 - c / D) * r + c * m).abs()

    def select(self, score: Tensor) -> Tensor:  # (S,) -> (K,) int64 ascending
        """Top-K of the whole partition, or of each of its blocks."""
        size = score.numel()
        if size == 0:
            return torch.zeros(0, dtype=torch.int64)
        if self.selection == "partition":
            return top_k(score, keep_count(size, self.density))
        picked = []
        for start in range(0, size, self.block_size):
            block = score[start : start + self.block_size]
            picked.append(start + top_k(block, keep_count(block.numel(), self.density)))
        return torch.cat(picked)
