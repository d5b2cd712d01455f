"""The optimizer's mathematics: pure functions of tensors, no process group.

AdamS (arXiv 2505.16363) takes its normalizer from the first moment. SCAPE (arXiv 2607.01678) applies it late and to
few elements: an element that was last synchronised D steps ago receives those D steps at once. Letters: S elements of
one ZeRO partition, K elements synchronised now, t the optimizer step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_scape.config import AdamSOptions, parse_options
from deepspeed_scape.upload import upload

EMA_FLOOR = 0.9  # an "ema" normalizer keeps at least this much of its memory, however late the visit


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """What one parameter group contributes to one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    normalizer: str  # "ema" or "adams"

    @classmethod
    def of_group(cls, group: dict[str, Any], normalizer: str) -> Hyper:
        beta1, beta2 = group["betas"]
        return cls(lr=float(group["lr"]), beta1=beta1, beta2=beta2, eps=group["eps"], normalizer=normalizer)


def adams_step_(
    weight: Tensor,  # any shape, fp32, updated
    exp_avg: Tensor,  # m, updated
    exp_avg_sq: Tensor,  # v, overwritten
    grad: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One dense AdamS step, in place (arXiv 2505.16363): the reference that density 1 must equal.

    m_t = b1 m + (1-b1) g;  v_t = b2 m_{t-1}^2 + (1-b2) g^2;  w = (1 - lr wd) w - lr m_t / (sqrt(v_t) + eps)
    """
    torch.mul(exp_avg, exp_avg, out=exp_avg_sq)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
    weight.mul_(1 - lr * weight_decay)
    weight.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(eps), value=-lr)


def log_beta(beta: float) -> float:
    """Natural logarithm of a decay rate; a rate of 0 forgets everything (-inf, and exp(-inf * D) = 0)."""
    return math.log(beta) if beta > 0 else -math.inf


def momentum_sum(beta1: float) -> float:
    """c_inf = b1/(1-b1): what one unit of gradient still moves after its own step. c(D) = c_inf (1 - b1^D)."""
    return beta1 / (1 - beta1)


@dataclass(frozen=True, kw_only=True)
class DelayTables:
    """Functions of the delay D that involve powers, one fp32 entry for every D that can occur, computed in fp64."""

    forgotten: Tensor  # 1 - b1^D
    keep: Tensor  # B = max(b2^D, EMA_FLOOR)
    moved: Tensor  # c(max(1, D))
    share: Tensor  # 1 - c(D')/D', D' = max(1, D)


def delay_tables(beta1: float, beta2: float, step: int, device: torch.device) -> DelayTables:
    """Tables for delays of 0 to at least ``step`` steps."""
    return _delay_tables(beta1, beta2, max(65536, 1 << step.bit_length()), device)


@functools.lru_cache(maxsize=16)
def _delay_tables(beta1: float, beta2: float, longest: int, device: torch.device) -> DelayTables:
    delay = torch.arange(longest + 1, dtype=torch.float64)
    forgotten = -torch.expm1(delay * log_beta(beta1)) if beta1 > 0 else (delay > 0).double()
    keep = torch.pow(torch.tensor(beta2, dtype=torch.float64), delay).clamp(min=EMA_FLOOR)
    moved = momentum_sum(beta1) * forgotten
    moved[0] = moved[1]
    share = 1 - moved / delay.clamp(min=1)
    forgotten, keep, moved, share = (upload(table.float(), device) for table in (forgotten, keep, moved, share))
    return DelayTables(forgotten=forgotten, keep=keep, moved=moved, share=share)


def owner_update(
    mean: Tensor,  # R (K,) fp32: mean over the ranks of the gradients unsent since the last visit
    delay: Tensor,  # D (K,) fp32, >= 1: steps since the last visit
    weight: Tensor,  # w (K,) fp32 master weights
    exp_avg: Tensor,  # m (K,) fp32
    exp_avg_sq: Tensor,  # v (K,) fp32
    first_visit: Tensor,  # (K,) bool: never synchronised before
    log_decay: Tensor | None,  # (K,) fp32: sum of log(1 - lr_tau wd) over the D steps; None without weight decay
    hyper: Hyper,
) -> tuple[Tensor, Tensor, Tensor]:  # new (weight, exp_avg, exp_avg_sq), each (K,) fp32
    """Apply D pending AdamS steps to K elements (DESIGN section 1; with D = 1 and "adams" it is dense AdamS).

    gam = R/D;  U = R + (m - gam) c(D);  s2 = R^2/D;  w = w prod(1 - lr wd) - lr U/d;  m = b1^D m + (1 - b1^D) gam
    """
    forgotten = torch.expm1(delay * log_beta(hyper.beta1)).neg_()  # 1 - b1^D
    gradient = mean / delay  # gam
    toward = gradient - exp_avg
    second = mean * gradient  # s2
    if hyper.normalizer == "adams":
        new_sq = exp_avg.square().mul_(hyper.beta2).add_(second, alpha=1 - hyper.beta2)
        normalizer = new_sq.sqrt()
    else:
        keep = torch.exp(delay * log_beta(hyper.beta2)).clamp_(min=EMA_FLOOR)  # B
        new_sq = torch.where(first_visit, second, torch.lerp(second, exp_avg_sq, keep))
        normalizer = (new_sq * ema_scale(hyper.beta1, hyper.beta2)).sqrt_()
    update = torch.addcmul(mean, toward, forgotten, value=-momentum_sum(hyper.beta1))  # U
    decayed = weight if log_decay is None else weight * torch.exp(log_decay)
    new_weight = torch.addcdiv(decayed, update, normalizer.add_(hyper.eps), value=-hyper.lr)
    return new_weight, torch.addcmul(exp_avg, toward, forgotten), new_sq


def ema_scale(beta1: float, beta2: float) -> float:
    """AdamS' normalizer of a stationary gradient in units of its mean square: b2 E[m^2]/E[g^2] + 1 - b2."""
    return beta2 * (1 - beta1) / (1 + beta1) + 1 - beta2


class AdamS(torch.optim.Optimizer):
    """Dense AdamS (arXiv 2505.16363): a plain torch optimizer, usable with any ZeRO stage.

    Args:
        params: tensors or parameter groups, as for every torch optimizer.
        lr, betas, eps, weight_decay: see :class:`deepspeed_scape.config.AdamSOptions`.

    Raises:
        ScapeConfigError: an unknown option or one out of range.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, parse_options(options, AdamSOptions).model_dump())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply one step to every parameter that has a gradient and return what ``closure`` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_param(param, param.grad, group)
        return loss

    def _step_param(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if grad.is_sparse:
            raise RuntimeError("AdamS does not take sparse gradients; set sparse=False in the embedding")
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        adams_step_(
            param,
            state["exp_avg"],
            state["exp_avg_sq"],
            grad,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
