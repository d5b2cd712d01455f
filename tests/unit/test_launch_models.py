"""The presets: sizes that their names promise, and models that behave as a causal LM."""

import pytest
import torch

from launch.models import PRESETS, build_model, count_parameters, next_token_loss, parameters_of_preset

NAMED_SIZES = {"gpt-10m": 10e6, "gpt-25m": 25e6, "gpt-345m": 345e6, "llama-500m": 500e6, "llama-1.8b": 1.8e9}
EXACT = {
    "tiny": 136_960,
    "small": 470_528,
    "gpt-3m": 3_307_008,
    "gpt-10m": 10_024_000,
    "gpt-25m": 24_258_240,
    "gpt-345m": 354_823_168,
    "llama-500m": 498_292_480,
    "llama-1.8b": 1_775_372_288,
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count_of_every_preset(name: str) -> None:
    counted = parameters_of_preset(name)
    assert counted == EXACT[name]
    if name in NAMED_SIZES:
        assert abs(counted / NAMED_SIZES[name] - 1) < 0.03


@pytest.mark.parametrize("name", PRESETS)
def test_no_dropout_and_no_cache(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name)
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))
    assert model.config.use_cache is False
    assert model.training


def test_loss_ignores_what_comes_later() -> None:
    """A causal model's loss on the first tokens doesn't change with the last one."""
    torch.manual_seed(0)
    model = build_model("tiny", vocab=300, seq=16)
    tokens = torch.randint(0, 300, (2, 17))
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % 300
    a = model(input_ids=tokens[:, :-1]).logits
    b = model(input_ids=other[:, :-1]).logits
    torch.testing.assert_close(a, b)
    expected = torch.nn.functional.cross_entropy(a.reshape(-1, 300), tokens[:, 1:].reshape(-1))
    torch.testing.assert_close(next_token_loss(model, tokens), expected)


def test_same_seed_same_weights() -> None:
    torch.manual_seed(3)
    a = build_model("tiny")
    torch.manual_seed(3)
    b = build_model("tiny")
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_size_overrides() -> None:
    model = build_model("tiny", vocab=300, seq=32)
    preset = PRESETS["tiny"]
    saved = (preset.vocab - 300 + preset.seq - 32) * preset.hidden
    assert count_parameters(model) == EXACT["tiny"] - saved
