"""A tiny transformers model with dropout, its samples, and the same training by hand; shared by the trainers' ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

VOCAB, LENGTH, SAMPLES = 61, 12, 18  # 9 samples a rank: 5 batches of 2, so an epoch's last step has one micro-step
MICROS = 2


class Sequences(Dataset):
    """Arithmetic progressions modulo VOCAB."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = (7 * i + (1 + i % 5) * torch.arange(LENGTH)) % VOCAB
        return {"input_ids": tokens, "labels": tokens}


def build(seed: int = 0, dropout: float = 0.1) -> Any:
    """A GPT-2 of 9,000 parameters. Dropout, since a resume that forgets random states must show."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=24, n_layer=1, n_head=2, use_cache=False,
        bos_token_id=0, eos_token_id=0, pad_token_id=0, **drops,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


class Recorder:
    """What a model was given while it trained, and the losses it returned."""

    def __init__(self, model: Any) -> None:
        self.calls: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True), model.register_forward_hook(self._after)
        ]  # fmt: skip

    def _before(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if model.training:
            self.calls.append(copy.deepcopy(kwargs))

    def _after(self, model: Any, args: Any, output: Any) -> None:
        if model.training:
            self.losses.append(float(output.loss.detach()))


def by_hand(
    settings: dict[str, Any], calls: list[dict[str, Any]], steps: list[int], factor: float, **kwargs: Any
) -> Any:
    """DeepSpeed alone: an engine of ``settings`` after the recorded calls, ``steps`` of them per optimizer step.

    Args:
        factor: what the trainer multiplies the model's loss with.
    """
    import deepspeed

    model = build(dropout=0.0)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings, **kwargs)[0]
    waiting = iter(calls)
    for micros in steps:
        for micro in range(micros):
            engine.set_gradient_accumulation_boundary(micro == micros - 1)
            engine.backward(engine(**next(waiting)).loss * factor, scale_wrt_gas=False)
        engine.step()
    return engine
