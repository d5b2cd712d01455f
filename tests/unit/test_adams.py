"""The update rule against its definition, step by step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_scape.adams import AdamS, Hyper, adams_step_, ema_scale, owner_update
from deepspeed_scape.decay import DecayHistory

HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def textbook(w: float, m: float, v: float, g: float, wd: float) -> tuple[float, float, float]:
    """One scalar AdamS step in double precision, as the paper writes it."""
    new_m = 0.9 * m + 0.1 * g
    new_v = 0.95 * m**2 + 0.05 * g**2
    return (1 - 1e-2 * wd) * w - 1e-2 * new_m / (math.sqrt(new_v) + 1e-8), new_m, new_v


def test_dense_step_is_the_textbook() -> None:
    torch.manual_seed(0)
    w, m, v = torch.randn(50), torch.zeros(50), torch.zeros(50)
    scalars = [(float(x), 0.0, 0.0) for x in w]
    for _ in range(20):
        g = torch.randn(50)
        adams_step_(w, m, v, g, weight_decay=0.1, **HYPER)
        scalars = [textbook(*state, float(x), 0.1) for state, x in zip(scalars, g, strict=True)]
    assert torch.allclose(w, torch.tensor([s[0] for s in scalars]), rtol=1e-5, atol=1e-7)
    assert torch.allclose(m, torch.tensor([s[1] for s in scalars]), rtol=1e-5, atol=1e-7)


def test_visited_every_step_the_owner_update_is_dense_adams() -> None:
    torch.manual_seed(1)
    w, m, v = torch.randn(500), torch.randn(500), torch.zeros(500)
    dense = (w.clone(), m.clone(), v.clone())
    one = torch.ones(500)
    for _ in range(50):
        g = torch.randn(500)
        hyper = Hyper(normalizer="adams", **HYPER)
        w, m, v = owner_update(g, one, w, m, v, one > 2, torch.full((500,), math.log1p(-1e-3)), hyper)
        adams_step_(*dense, g, weight_decay=0.1, **HYPER)
    for mine, theirs in zip((w, m, v), dense, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-6


@given(delay=st.integers(1, 60), mean=st.floats(-2, 2), moment=st.floats(-1, 1))
def test_a_late_visit_applies_the_missed_first_moments(delay: int, mean: float, moment: float) -> None:
    """U and m of one late visit against D single steps of m_tau = b1 m_{tau-1} + (1-b1) R/D, whose sum U is."""
    total, m = 0.0, moment
    for _ in range(delay):
        m = 0.9 * m + 0.1 * mean / delay
        total += m
    one = torch.ones(1, dtype=torch.float32)
    hyper = Hyper(normalizer="adams", lr=1.0, beta1=0.9, beta2=0.95, eps=1e6)  # d = eps, so the step shows U
    w, new_m, _ = owner_update(mean * one, delay * one, 0 * one, moment * one, 0 * one, one > 0, None, hyper)
    assert float(new_m) == pytest.approx(m, abs=2e-6)
    assert float(w) * -1e6 == pytest.approx(total, abs=2e-5)


def test_ema_normalizer_starts_at_the_first_visit_and_keeps_at_least_nine_tenths() -> None:
    one = torch.ones(2)
    hyper = Hyper(normalizer="ema", **HYPER)
    first = torch.tensor([True, False])
    _, _, v = owner_update(2 * one, 40 * one, one, one, 7 * one, first, None, hyper)
    second = 4 / 40
    assert v.tolist() == pytest.approx([second, 0.9 * 7 + 0.1 * second])


def test_ema_scale_is_the_adams_normalizer_of_white_noise() -> None:
    """E[b2 m^2 + (1-b2) g^2] of white g with E[g^2] = 1."""
    torch.manual_seed(0)
    g = torch.randn(200_000, dtype=torch.float64)
    m, squares = 0.0, []
    for x in g.tolist():
        squares.append(0.95 * m * m + 0.05 * x * x)
        m = 0.9 * m + 0.1 * x
    assert ema_scale(0.9, 0.95) == pytest.approx(sum(squares) / len(squares), rel=0.02)


def test_beta1_zero_forgets() -> None:
    one = torch.ones(1)
    hyper = Hyper(normalizer="adams", lr=1.0, beta1=0.0, beta2=0.5, eps=1.0)
    w, m, _ = owner_update(3 * one, 2 * one, one, 9 * one, one, one > 2, None, hyper)
    assert torch.isfinite(w).all() and float(m) == pytest.approx(1.5)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 1.5)), min_size=1, max_size=50), st.data())
def test_lazy_decay_is_the_dense_product(steps: list[tuple[float, float]], data: st.DataObject) -> None:
    history = DecayHistory(torch.device("cpu"))
    for step, (lr, wd) in enumerate(steps, start=1):
        history.record(step, lr, wd)
    last = data.draw(st.integers(0, len(steps)))
    product = math.prod(1 - lr * wd for lr, wd in steps[last:])
    log = history.since(torch.tensor([last], dtype=torch.int32))
    assert (1.0 if log is None else math.exp(float(log))) == pytest.approx(product, rel=1e-5)


def test_decay_history_grows_and_survives_a_checkpoint() -> None:
    history = DecayHistory(torch.device("cpu"))
    for step in range(1, 3001):
        history.record(step, 1e-3, 0.1)
    other = DecayHistory(torch.device("cpu"))
    other.load(history.state())
    for h in (history, other):
        h.record(3001, 1e-3, 0.1)
        assert float(h.since(torch.tensor([1]))) == pytest.approx(3000 * math.log1p(-1e-4), rel=1e-6)


def test_decay_history_refuses_gaps_and_overturning_decay() -> None:
    history = DecayHistory(torch.device("cpu"))
    with pytest.raises(ValueError, match="after step 0"):
        history.record(2, 0.1, 0.1)
    with pytest.raises(ValueError, match="must be in"):
        history.record(1, 1.0, 1.0)


def test_adams_is_a_torch_optimizer() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = AdamS(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    x = torch.randn(64, 8)
    target = x.sum(1, keepdim=True)
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]
    copy = AdamS(model.parameters(), lr=1.0)
    copy.load_state_dict(optimizer.state_dict())
    assert copy.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert torch.equal(copy.state[model.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_adams_closure_and_sparse_gradients() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = AdamS(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
    weight = torch.nn.Parameter(torch.ones(1))
    assert float(AdamS([weight]).step(lambda: (weight * 2).sum())) == 2.0
