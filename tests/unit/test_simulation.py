"""The simulation against facts that do not come from it."""

import copy

import pytest
import torch
from torch import Tensor

from tests.simulation import GroupSpec, Simulation

SHAPES = [[(3, 5), (7,)], [(2, 2, 3), (1,)]]  # two groups; P is padded in both at W = 3


def make_groups(seed: int = 0, **overrides) -> list[GroupSpec]:
    gen = torch.Generator().manual_seed(seed)
    options = [
        {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8},
        {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.8, 0.99), "eps": 1e-6},
    ]
    return [
        GroupSpec(params=[torch.randn(shape, generator=gen) for shape in shapes], **{**option, **overrides})
        for shapes, option in zip(SHAPES, options, strict=True)
    ]


def random_grads(groups: list[GroupSpec], world_size: int, gen: torch.Generator, integers: bool = False):
    def draw(p: Tensor) -> Tensor:
        return torch.randint(-8, 9, p.shape, generator=gen).float() if integers else torch.randn(p.shape, generator=gen)

    return [[[draw(p) for p in group.params] for group in groups] for _ in range(world_size)]


def state_of(sim: Simulation):
    names = ("t", "rho", "replica", "master", "m", "v", "last", "residual", "masks", "log_decay")
    return copy.deepcopy({name: getattr(sim, name) for name in names})


def same(a, b) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("world_size", [1, 3])
def test_dense_adams_is_the_textbook(world_size):
    """Sparsity 0 and "adams" is dense AdamS on the mean gradient, with decoupled weight decay."""
    groups = make_groups()
    sim = Simulation(groups, world_size, sparsity=0.0, normalizer="adams")
    ref = [[(p.double(), torch.zeros_like(p).double()) for p in group.params] for group in groups]
    gen = torch.Generator().manual_seed(1)
    for step in range(50):
        grads = random_grads(groups, world_size, gen)
        lrs = [group.lr * (1 - step / 100) for group in groups]
        out = sim.step(grads, lrs)
        assert out["masks"][0].shape == (world_size, sim.partition_size(0)) and sim.masks == [None, None]
        for g, (group, lr) in enumerate(zip(groups, lrs, strict=True)):
            b1, b2 = group.betas
            for i, (w, m) in enumerate(ref[g]):
                grad = sum(rank[g][i].double() for rank in grads) / world_size
                v = b2 * m**2 + (1 - b2) * grad**2
                m = b1 * m + (1 - b1) * grad
                ref[g][i] = ((1 - lr * group.weight_decay) * w - lr * m / (v.sqrt() + group.eps), m)
    for g in range(len(groups)):
        for got, (want, _) in zip(sim.parameters(g), ref[g], strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("selection", ["partition", "block"])
@pytest.mark.parametrize("normalizer", ["ema", "adams"])
def test_nothing_is_lost(normalizer, selection):
    """Residuals of all ranks + everything synchronised = every gradient ever given (integers: exactly)."""
    world_size = 4  # a power of two, so that W * mean is exact
    groups = make_groups()
    sim = Simulation(groups, world_size, 0.8, normalizer, selection, block_size=5)
    gen = torch.Generator().manual_seed(2)
    given = [torch.zeros(flat.numel(), dtype=torch.float64) for flat in sim.master]
    sent = [torch.zeros_like(total) for total in given]
    for _ in range(40):
        grads = random_grads(groups, world_size, gen, integers=True)
        out = sim.step(grads)
        for g in range(len(groups)):
            for rank in range(world_size):
                given[g] += sim.flatten(grads[rank][g]).double()
                where = rank * sim.partition_size(g) + out["masks"][g][rank]
                sent[g][where] += world_size * out["R"][g][rank].double()
        for g in range(len(groups)):
            pending = sum(sim.residual[rank][g].double() for rank in range(world_size))
            assert torch.equal(pending + sent[g], given[g])
            assert pending.abs().sum() > 0 and sent[g].abs().sum() > 0


@pytest.mark.parametrize("selection", ["partition", "block"])
def test_only_the_mask_changes(selection):
    """Outside the mask no weight, moment, visit or replica changes; inside, `last` is t and the residual is 0."""
    world_size = 3
    groups = make_groups()
    sim = Simulation(groups, world_size, 0.8, selection=selection, block_size=5, model_dtype=torch.bfloat16)
    gen = torch.Generator().manual_seed(3)
    for t in range(1, 21):
        before = state_of(sim)
        out = sim.step(random_grads(groups, world_size, gen))
        for g in range(len(groups)):
            size = sim.partition_size(g)
            inside = torch.zeros(size * world_size, dtype=torch.bool)
            for rank, index in enumerate(out["masks"][g]):
                assert index.tolist() == sorted(set(index.tolist()))
                inside[rank * size + index] = True
            for name in ("replica", "master", "m", "v", "last"):
                assert torch.equal(getattr(sim, name)[g][~inside], before[name][g][~inside]), name
            assert (sim.last[g][inside] == t).all()
            assert all((sim.residual[rank][g][inside] == 0).all() for rank in range(world_size))
            assert torch.equal(sim.replica[g][inside], sim.master[g][inside].bfloat16())
            assert not torch.equal(sim.master[g][inside], before["master"][g][inside])


def brute_force_top(values: list[float], k: int) -> list[int]:
    return sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[:k])


def test_mask_is_the_brute_force_choice():
    """Ties by lowest index, partition-wide and per block with a short tail."""
    score = torch.randint(0, 4, (23,), generator=torch.Generator().manual_seed(4)).float()
    sim = Simulation(make_groups(), 1, 0.8)
    assert sim.select(score).tolist() == brute_force_top(score.tolist(), 5)
    sim = Simulation(make_groups(), 1, 0.8, selection="block", block_size=10)
    want = brute_force_top(score[:10].tolist(), 2)
    want += [10 + i for i in brute_force_top(score[10:20].tolist(), 2)]
    want += [20 + i for i in brute_force_top(score[20:].tolist(), 1)]
    assert sim.select(score).tolist() == want
    assert Simulation(make_groups(), 1, 0.999).select(score).numel() == 1


def test_first_mask_is_each_owners_own_and_later_ones_are_late():
    """Step 1 picks the owner's own largest gradients; from step 2 on the mask was made before the gradients came."""
    groups = [GroupSpec([torch.zeros(16)])]
    sim = Simulation(groups, 2, 0.75)
    grads = torch.zeros(2, 16)
    grads[0, 3], grads[0, 5] = 2.0, 1.0
    grads[0, 9] = 100.0  # in rank 1's partition: rank 1 does not see it
    grads[1, 12], grads[1, 15] = 1.0, 3.0
    out = sim.step([[[row]] for row in grads])
    assert out["masks"][0].tolist() == [[3, 5], [4, 7]]
    assert out["R"][0].tolist() == [[1.0, 0.5], [0.5, 1.5]]
    late = sim.masks[0].clone()
    assert sim.residual[0][0][9] == 100.0
    out = sim.step([[[torch.randn(16) * 50]], [[torch.randn(16) * 50]]])
    assert torch.equal(out["masks"][0], late)
    assert sim.masks[0].shape == late.shape


def test_the_score_is_the_pending_first_moment():
    """The score of an element unvisited for D steps is the sum of the first moments a dense run would have applied."""
    b1 = 0.9
    sim = Simulation([GroupSpec([torch.zeros(2)], betas=(b1, 0.95))], 1, 0.5)
    sim.t, g, m0, D = 7, 0.3, -0.2, 4
    sim.m[0][:] = m0
    sim.last[0][:] = sim.t - D
    sim.residual[0][0][:] = D * g
    m, total = m0, 0.0
    for _ in range(D):
        m = b1 * m + (1 - b1) * g
        total += m
    torch.testing.assert_close(sim.score(0, 0), torch.full((2,), abs(total)), rtol=1e-5, atol=0)


def test_late_visits_add_up_to_the_dense_momentum():
    """Under constant gradients what is applied until the last visit is exactly the sum of the dense first moments."""
    big = 1e6  # d is eps, so -(w - w0) is the sum of the U
    b1 = 0.9
    gradient = torch.linspace(0.5, 2.0, 16)
    sim = Simulation([GroupSpec([torch.zeros(16)], lr=big, betas=(b1, 0.95), eps=big)], 2, 0.75)
    for _ in range(60):
        sim.step([[[gradient]], [[gradient]]])
    assert len(set(sim.last[0].tolist())) > 2 and sim.last[0].min() > 0
    for w, m, last, g in zip(sim.master[0], sim.m[0], sim.last[0].tolist(), gradient.tolist(), strict=True):
        dense = [(1 - b1**tau) * g for tau in range(1, last + 1)]
        torch.testing.assert_close(float(w), -sum(dense), rtol=1e-4, atol=0)
        torch.testing.assert_close(float(m), dense[-1], rtol=1e-4, atol=0)


def test_ema_normalizer_by_hand():
    """v is s2 at the first visit, then an average whose decay is never under 0.9; s2 = R^2 / D."""
    b1, b2, lr, eps = 0.9, 0.95, 0.1, 1e-8
    sim = Simulation([GroupSpec([torch.zeros(2)], lr=lr, betas=(b1, b2), eps=eps)], 1, 0.0)
    w = m = v = 0.0
    visits = [(1, 1.0), (2, -3.0), (7, 4.0)]  # (t, R); five steps lie between the last two
    for t, R in visits:
        D = t - int(sim.last[0][0])
        sim.t = t - 1
        sim.log_decay[0] = [0.0] * t
        sim.step([[[torch.full((2,), R)]]])
        decay = max(b2**D, 0.9)
        v = R * R / D if t == 1 else decay * v + (1 - decay) * R * R / D
        U = R + (m - R / D) * sum(b1**k for k in range(1, D + 1))
        w -= lr * U / ((v * (b2 * (1 - b1) / (1 + b1) + 1 - b2)) ** 0.5 + eps)
        m = b1**D * m + (1 - b1**D) * R / D
    got = [float(x[0][0]) for x in (sim.master, sim.m, sim.v)]
    assert got == pytest.approx([w, m, v], rel=1e-5)
    assert max(b2**5, 0.9) == 0.9


def test_lazy_decay_is_the_dense_product():
    """At each visit the weight has decayed by every step's own learning rate since the last visit."""
    world_size, wd = 2, 0.5
    w0 = torch.randn(32, generator=torch.Generator().manual_seed(5))
    sim = Simulation([GroupSpec([w0], weight_decay=wd, eps=1e30)], world_size, 0.75)  # eps: nothing but the decay
    gen = torch.Generator().manual_seed(6)
    product, seen = 1.0, set()
    for t in range(1, 61):
        lr = 0.01 + 0.001 * t
        product *= 1 - lr * wd
        before = sim.last[0].clone()
        sim.step([[[torch.randn(32, generator=gen)]] for _ in range(world_size)], [lr])
        visited = sim.last[0] == t
        seen |= set((t - before[visited]).tolist())
        torch.testing.assert_close(sim.master[0][visited], w0[visited] * product, rtol=2e-6, atol=0)
    assert len(seen) > 3  # visits after gaps of several lengths


def test_warmup_is_dense_and_ends_with_a_late_mask():
    groups = make_groups()
    dense = Simulation(groups, 2, 0.0)
    sim = Simulation(groups, 2, 0.8, warmup_steps=3)
    gen = torch.Generator().manual_seed(7)
    for t in range(1, 4):
        grads = random_grads(groups, 2, gen)
        dense.step(grads)
        sim.step(grads)
        assert all(map(torch.equal, sim.master, dense.master))
        assert (sim.masks[0] is not None) == (t == 3)
    late = sim.masks[0].clone()
    out = sim.step(random_grads(groups, 2, gen))
    assert torch.equal(out["masks"][0], late) and late.shape[1] < sim.partition_size(0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_bad_step_changes_nothing(bad):
    groups = make_groups()
    sim = Simulation(groups, 3, 0.8, clip_grad=1.0)
    gen = torch.Generator().manual_seed(8)
    for _ in range(3):
        sim.step(random_grads(groups, 3, gen))
    before = state_of(sim)
    grads = random_grads(groups, 3, gen)
    grads[2][1][0].view(-1)[0] = bad
    assert sim.step(grads) == {"skipped": True}
    assert same(state_of(sim), before)
    assert not sim.step(random_grads(groups, 3, gen))["skipped"]
    assert not same(state_of(sim), before)


def test_clipping_learns_the_noise_ratio():
    """Equal gradients: the estimate is the mean gradient's norm. Orthogonal: sqrt(W) under the rms, from step 2."""
    world_size = 2
    for dtype in (torch.float32, torch.bfloat16):
        sim = Simulation([GroupSpec([torch.zeros(8)])], world_size, 0.0, clip_grad=1.0, value_dtype=dtype)
        same_grad = torch.full((8,), 2.0)
        for _ in range(2):
            out = sim.step([[[same_grad]], [[same_grad]]])
            assert out["norm"] == pytest.approx(32**0.5, rel=1e-6) and out["rho"] == 1.0
            assert out["clip"] == pytest.approx(1 / 32**0.5, rel=1e-5)
    left, right = torch.zeros(8), torch.zeros(8)
    left[:4], right[4:] = 3.0, 3.0
    sim = Simulation([GroupSpec([torch.zeros(8)])], world_size, 0.0, clip_grad=1.0)
    out = sim.step([[[left]], [[right]]])
    assert out["norm"] == pytest.approx(6.0) and out["clip"] == pytest.approx(1 / 6, rel=1e-5)
    torch.testing.assert_close(out["R"][0].flatten(), (left + right) / 2 * out["clip"])
    out = sim.step([[[left]], [[right]]])
    assert out["rho"] == pytest.approx(0.5) and out["norm"] == pytest.approx((left + right).div(2).norm().item())
    assert Simulation(make_groups(), 2, 0.5).step(random_grads(make_groups(), 2, torch.Generator()))["clip"] == 1.0


def test_dtypes_round_where_they_should():
    """bf16 values, residuals and replicas; the masters stay fp32 and start at what the model can hold."""
    groups = make_groups()
    bf16 = torch.bfloat16
    sim = Simulation(groups, 2, 0.8, value_dtype=bf16, residual_dtype=bf16, model_dtype=bf16)
    assert torch.equal(sim.parameters(0)[0], groups[0].params[0].to(bf16))
    assert torch.equal(sim.master[0], sim.replica[0].float())
    sim.step(random_grads(groups, 2, torch.Generator().manual_seed(9)))
    assert sim.residual[1][0].dtype == bf16 and sim.master[0].dtype == torch.float32
    assert [p.shape for p in sim.parameters(0)] == [p.shape for p in groups[0].params]
    sim = Simulation([GroupSpec([torch.zeros(4)])], 2, 0.0, value_dtype=bf16)
    third, fifth = torch.full((4,), 1 / 3), torch.full((4,), 1 / 5)
    out = sim.step([[[third]], [[fifth]]])  # each value is rounded, the sum is not
    want = (third.to(bf16).float() + fifth.to(bf16).float()) / 2
    assert torch.equal(out["R"][0].flatten(), want) and not torch.equal(want, want.to(bf16).float())


@pytest.mark.parametrize("normalizer", ["ema", "adams"])
def test_a_tiny_network_trains_at_90_percent(normalizer):
    gen = torch.Generator().manual_seed(10)
    world_size = 2
    x = torch.randn(64, 8, generator=gen)
    y = torch.tanh(x @ torch.randn(8, 1, generator=gen))
    shapes = [(8, 32), (32,), (32, 1), (1,)]
    groups = [GroupSpec([0.3 * torch.randn(shape, generator=gen) for shape in shapes], lr=3e-3)]
    sim = Simulation(groups, world_size, 0.9, normalizer)

    def loss_of(params, part):
        w1, b1, w2, b2 = params
        return (torch.tanh(x[part] @ w1 + b1) @ w2 + b2 - y[part]).square().mean()

    first = loss_of(sim.parameters(0), slice(None)).item()
    for _ in range(300):
        grads = []
        for rank in range(world_size):
            params = [p.requires_grad_() for p in sim.parameters(0)]
            loss_of(params, slice(rank, None, world_size)).backward()
            grads.append([[p.grad for p in params]])
        sim.step(grads)
    assert loss_of(sim.parameters(0), slice(None)).item() < 0.1 * first
