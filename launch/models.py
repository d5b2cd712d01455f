"""The models: a table of presets, and causal language models built from it (no weights are downloaded)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

END_OF_TEXT_ID = 0


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Sizes of one model. `vocab` and `seq` are defaults that `--vocab-size` and `--seq-len` replace."""

    family: str  # "gpt2" | "llama"
    layers: int
    hidden: int
    heads: int
    ffn: int  # width of the feed-forward layer
    seq: int  # tokens a sample is trained on
    vocab: int


PRESETS: dict[str, Preset] = {
    "tiny": Preset(family="gpt2", layers=2, hidden=64, heads=4, ffn=256, seq=64, vocab=512),
    "small": Preset(family="gpt2", layers=2, hidden=128, heads=4, ffn=512, seq=64, vocab=512),
    "gpt-3m": Preset(family="gpt2", layers=4, hidden=256, heads=4, ffn=1024, seq=64, vocab=512),
    "gpt-10m": Preset(family="gpt2", layers=7, hidden=320, heads=5, ffn=1280, seq=256, vocab=4096),
    "gpt-25m": Preset(family="gpt2", layers=8, hidden=480, heads=8, ffn=1920, seq=256, vocab=4096),
    "gpt-345m": Preset(family="gpt2", layers=24, hidden=1024, heads=16, ffn=4096, seq=1024, vocab=50257),
    "llama-500m": Preset(family="llama", layers=21, hidden=1280, heads=20, ffn=3456, seq=1024, vocab=32000),
    "llama-1.8b": Preset(family="llama", layers=32, hidden=2048, heads=16, ffn=5632, seq=2048, vocab=32000),
}


def _gpt2_config(preset: Preset, vocab: int, seq: int) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=vocab,
        n_positions=seq,
        n_embd=preset.hidden,
        n_layer=preset.layers,
        n_head=preset.heads,
        n_inner=preset.ffn,
        activation_function="gelu_pytorch_tanh",  # gelu_new's formula in one kernel instead of eight
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
    )


def _llama_config(preset: Preset, vocab: int, seq: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=preset.hidden,
        intermediate_size=preset.ffn,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.heads,
        max_position_embeddings=seq,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
    )


def build_model(name: str, *, vocab: int | None = None, seq: int | None = None) -> nn.Module:
    """A randomly initialised fp32 causal LM of preset `name`, on the default device, dropout 0.

    The weights follow torch's global generator: seed it the same on every rank. Raises KeyError for an unknown name.
    """
    from transformers import AutoModelForCausalLM

    preset = PRESETS[name]
    make = {"gpt2": _gpt2_config, "llama": _llama_config}[preset.family]
    config = make(preset, vocab or preset.vocab, seq or preset.seq)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def count_parameters(model: nn.Module) -> int:
    """Elements of all parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def next_token_loss(
    model: Callable[..., Any],  # a causal LM
    tokens: Tensor,  # (B, seq + 1) int64: each position predicts the one after it
) -> Tensor:  # () fp32, mean negative log-likelihood in nats
    """Cross entropy of every token given those before it in its window."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits  # (B, seq, vocab)
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def parameters_of_preset(name: str) -> int:
    """Parameter count of a preset, from the meta device: nothing is allocated."""
    with torch.device("meta"):
        return count_parameters(build_model(name))
