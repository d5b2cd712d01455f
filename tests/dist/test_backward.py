"""Backward in its three forms, recomputed activations, accumulation and torch.compile: all of them the plain step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest

from tests.dist.rank_backward import CASES, COMPILED_AUTOGRAD, DIRECT
from tests.launch import run_ranks

pytestmark = pytest.mark.dist
SCRIPT = Path(__file__).with_name("rank_backward.py")
ENGINE_ONLY = f"DeepSpeed {deepspeed.__version__} knows engine.backward(loss) only; loss.backward() came with 0.18.3"
needs_direct = pytest.mark.skipif(not DIRECT, reason=ENGINE_ONLY)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(SCRIPT, 2)


def close(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """The same run up to rounding, which may now and then choose another element at the mask's edge."""
    far = sum(abs(a - b) > 1e-4 for a, b in zip(one["masters"], other["masters"], strict=True))
    return far <= len(one["masters"]) // 100 and one["losses"] == pytest.approx(other["losses"], rel=1e-3)


@needs_direct
@pytest.mark.parametrize("case", CASES)
def test_the_ways_of_calling_backward_are_one(ranks: list[dict[str, Any]], case: str) -> None:
    """DeepSpeed divides loss.backward() by the micro-steps at every output: twice for a loss beside its logits."""
    for result in ranks:
        runs = {way: result["ways"].get(f"{case}-{way}") for way in ("engine", "loss", "scale")}
        assert runs["engine"]["losses"][-1] != runs["engine"]["losses"][0]
        for run in (runs["scale"], runs["loss"]):
            if run is None:
                assert "fp16" in case
            elif "-3-" in case or "fp16" in case:  # g / 3 rounds unlike loss / 3, and so do fp16's smallest
                assert close(run, runs["engine"])
            else:
                assert run == runs["engine"]


@needs_direct
def test_a_second_backward_of_one_forward_is_not_lost(ranks: list[dict[str, Any]]) -> None:
    """DeepSpeed ends only the first of them with an epilogue."""
    for result in ranks:
        assert set(result["twice"]) == {"engine", "loss"}
        assert all(missing < 1e-5 for missing in result["twice"].values())


@pytest.mark.skipif(DIRECT, reason="this DeepSpeed knows loss.backward()")
def test_a_deepspeed_that_knows_no_other_backward_refuses_it_at_the_step(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        said = result["unscaled"]["direct"]
        assert said.startswith("RuntimeError: step() found gradients") and "Remedy: engine.backward(loss)" in said
        for case in CASES:
            losses = result["ways"][f"{case}-engine"]["losses"]
            assert losses[-1] != losses[0]


@pytest.mark.parametrize("scale", ["dynamic", "static"])
def test_an_unscaled_fp16_backward_is_refused(ranks: list[dict[str, Any]], scale: str) -> None:
    """DeepSpeed itself lets it pass where the scale is static, and divides by a scale that was never there."""
    for result in ranks:
        said = result["unscaled"][scale]  # before 0.18.3 DeepSpeed does not see it, and our step speaks alone
        assert said.startswith("RuntimeError: Loss scaling is required") if DIRECT else said == "nothing"
        assert "engine.scale(loss)" in result["unscaled"][f"{scale} step"]


def test_gradients_that_deepspeed_has_not_seen_are_refused(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert "instead of engine(...)" in result["unscaled"]["module"]


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant", "deepspeed"])
@pytest.mark.parametrize("way", ["engine", pytest.param("loss", marks=needs_direct)])
@pytest.mark.parametrize("case", ["fp32-1", "bf16-1", "fp32-2"])
def test_recomputed_activations_change_nothing(ranks: Any, case: str, way: str, recompute: str) -> None:
    for result in ranks:
        alone = result["recomputed"]["deepspeed alone"]  # without SCAPE, without an engine
        if recompute == "deepspeed" and alone != "nothing" and not DIRECT:
            pytest.skip(f"DeepSpeed {deepspeed.__version__} recomputes on accelerators with streams only ({alone})")
        run, kept = (result["recomputed"][f"{case}-{name}"] for name in (f"{recompute}-{way}", "no-engine"))
        # a layer that is used twice gives its gradient in two parts, so two micro-steps are summed in another order
        assert close(run, kept) if case == "fp32-2" and recompute != "not reentrant" else run == kept


@pytest.mark.parametrize("stage", [1, 2])
def test_who_decides_on_the_last_micro_step_does_not_matter(ranks: list[dict[str, Any]], stage: int) -> None:
    for result in ranks:
        runs = result["accumulated"]
        for name in ("boundary", "unmanaged", "coalesce", "no_sync", "no_sync divided"):
            if isinstance(run := runs.get(f"{stage}-{name}"), dict):
                assert run["digest"] == runs[f"{stage}-managed"]["digest"], name
    assert all(isinstance(ranks[0]["accumulated"][f"1-{name}"], dict) for name in ("no_sync", "no_sync divided"))


def test_what_deepspeed_does_not_support_is_refused_by_name(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert "no_sync context manager is incompatible" in result["accumulated"]["2-no_sync"]
        for stage in (1, 2):
            said = result["accumulated"].get(f"{stage}-set boundary")
            assert said is None or "not supported with managed_gradient_accumulation=False" in said


@pytest.mark.parametrize("how", ["before", "engine", pytest.param("loss.backward", marks=needs_direct), "recompute"])
def test_a_compiled_model_trains_as_an_eager_one(ranks: list[dict[str, Any]], how: str) -> None:
    for result in ranks:
        assert close(result["compiled"][f"eager-{how}"], result["compiled"]["none"])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiler_that_compiles_trains_as_eager_does(backend: str) -> None:
    """Compiled autograd and loss.backward() too, where DeepSpeed has them."""
    for result in run_ranks(SCRIPT, 2, [backend], timeout=550):
        assert len(result) == 4 + DIRECT + COMPILED_AUTOGRAD
        for name, run in result.items():
            assert close(run, result["none"]), name
