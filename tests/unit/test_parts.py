"""Messages of a step, norms, checksums, and the arguments of ``deepspeed_scape.run``, each without a launch."""

import copy
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_scape import buffers, kernels, register
from deepspeed_scape.buffers import WireBuffers
from deepspeed_scape.config import ScapeOptions
from deepspeed_scape.group import ScapeGroup
from deepspeed_scape.layout import ParamSlot, group_layout
from deepspeed_scape.norms import GradientNorms
from deepspeed_scape.optimizer import Scape
from deepspeed_scape.replicas import _find_problems, checksum
from deepspeed_scape.run import split_arguments


def group(numel: int, dtype: torch.dtype, world: int = 2, rank: int = 0, **options: Any) -> ScapeGroup:
    """A group of one parameter, outside any engine."""
    chosen = ScapeOptions(**{"sparsity": 0.5, **options})
    flat = torch.arange(numel, dtype=torch.float32).to(dtype)
    layout = group_layout((ParamSlot(name="p", start=0, numel=numel),), numel, world, chosen)
    size = layout.partition_size
    master = flat[rank * size : (rank + 1) * size].float().clone()
    optimizer = Scape([master], **chosen.model_dump())
    state = {"step": torch.zeros(()), "exp_avg": torch.zeros(size), "exp_avg_sq": torch.zeros(size)}
    optimizer.state[master] = state
    return ScapeGroup(layout=layout, options=chosen, optimizer=optimizer, number=0, flat=flat, master=master, rank=rank)


@pytest.mark.parametrize(
    ("piece", "kept"),
    [
        (None, [2, 1, 1]),
        ((slice(0, 3), slice(0, 2), slice(0, 1)), [3, 2, 1]),
        ((slice(2, 3), slice(0, 1), slice(0, 0)), [1, 1, 0]),
    ],
)
def test_messages_keep_groups_of_different_dtypes_apart(piece: Any, kept: list[int]) -> None:
    groups = [group(6, torch.bfloat16), group(4, torch.float32), group(2, torch.float16)]
    wire = WireBuffers(groups, 2, torch.float32)
    packed, parts = wire.send_buffer(piece)
    assert [tuple(part.shape) for part in parts] == [(2, n) for n in kept]
    own, rows = wire.param_buffer(piece)
    assert own.numel() % 4 == 0
    for row, value in zip(rows, (1.5, 2.5, 3.5), strict=True):
        row.fill_(value)
    got = wire.split_params(torch.stack([own, own]), piece)
    for values, g, n, value in zip(got, groups, kept, (1.5, 2.5, 3.5), strict=True):
        assert values.dtype == g.flat.dtype and values.shape == (2, n) and (values == value).all()
    assert [part.numel() for part in wire.split_mean(packed[0], piece)] == kept


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4), world=st.integers(1, 4), most=st.integers(1, 200))
def test_a_dense_step_goes_in_pieces_that_hold_everything_once(sizes: list[int], world: int, most: int) -> None:
    with mock.patch.object(buffers, "PIECE", most):
        wire = WireBuffers([group(size * world, torch.float32, world) for size in sizes], world, torch.float32)
        pieces = wire.dense_pieces()
    seen = [torch.zeros(size, dtype=torch.int64) for size in sizes]
    for piece in pieces:
        assert 0 < world * sum(columns.stop - columns.start for columns in piece) <= max(most, world)
        for counts, columns in zip(seen, piece, strict=True):
            counts[columns] += 1
    assert all(bool((counts == 1).all()) for counts in seen)
    assert len(pieces) == -(-sum(sizes) // max(1, most // world))


def test_masks_of_all_groups_share_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [group(12, torch.float32), group(8, torch.float32)]
    wire = WireBuffers(groups, 2, torch.float32)
    for g, chosen in zip(groups, (torch.tensor([0, 2, 5]), torch.tensor([1, 3])), strict=True):
        monkeypatch.setattr(g, "select", lambda step, chosen=chosen: chosen)
    own = wire.encode_next_masks(step=1)
    masks = wire.decode_masks(torch.stack([own, own]))
    assert [m.tolist() for m in masks] == [[[0, 2, 5]] * 2, [[1, 3]] * 2]


def test_a_group_before_its_first_mask_says_so() -> None:
    with pytest.raises(RuntimeError, match="no mask has been made"):
        group(4, torch.float32).pack(torch.empty(2, 1))


@pytest.mark.parametrize("recorded", [1, 5], ids=["behind", "ahead"])
def test_a_decay_history_of_another_step_is_refused(recorded: int) -> None:
    """Pieces of one step record it once; a history that is ahead of the step is damage, and no further piece."""
    some, mean = group(8, torch.float32), torch.zeros(2)
    some.update(mean, 1, slice(0, 2))
    some.update(mean, 1, slice(2, 4))
    assert some.decay.steps == 1
    some.decay.load(torch.zeros(recorded + 1, dtype=torch.float64))
    with pytest.raises(ValueError, match=f"decay of step 3 recorded after step {recorded}"):
        some.update(mean, 3, slice(0, 2))


class OneRank:
    """Stands for an exchange in which every rank has what this one has."""

    def __init__(self, world: int) -> None:
        self.world = world

    def sum_scalars(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.world


def test_norm_estimate_is_exact_for_equal_gradients_and_corrects_for_noise() -> None:
    norms = GradientNorms(4)
    norms.agree([torch.tensor(9.0, dtype=torch.float64)], OneRank(4), torch.device("cpu"))
    assert norms.rms == 3.0 and norms.estimate == 3.0
    norms.judge(1.5, 1.0)
    assert norms.coefficient == pytest.approx(0.5) and norms.finite
    norms.judge(0.0, 2.0)
    assert norms.coefficient == 1.0
    packed = torch.full((4, 2), 1.0)  # this rank sent 8 ones; the mean it received is a quarter of that: pure noise
    norms.note_synchronised(packed, torch.full((2,), 0.5))
    norms.agree([torch.tensor(9.0, dtype=torch.float64)], OneRank(4), torch.device("cpu"))
    assert norms.signal_share == pytest.approx(0.25)
    assert norms.estimate == pytest.approx(1.5)


def test_a_mask_that_a_gpu_found_damaged_stops_all_ranks_at_the_scalar() -> None:
    local = [torch.tensor(1.0, dtype=torch.float64)]
    norms, faults = GradientNorms(2), torch.zeros(1, dtype=torch.int32)
    norms.agree(local, OneRank(2), torch.device("cpu"), faults)
    with pytest.raises(RuntimeError, match="a gathered mask was damaged"):
        norms.agree(local, OneRank(2), torch.device("cpu"), faults + 1)


def test_norms_refuse_a_nan_and_forget_it() -> None:
    norms = GradientNorms(2)
    for total, finite in ((math.nan, False), (math.inf, False), (1.0, True)):
        norms.agree([torch.tensor(total, dtype=torch.float64)], OneRank(2), torch.device("cpu"))
        norms.judge(0.0, 1.0)
        assert norms.finite == finite
    assert norms.estimate == 1.0


def test_a_norm_whose_square_is_no_fp32_number_is_refused_unless_clipped() -> None:
    norms = GradientNorms(1)
    norms.agree([torch.tensor(1e40, dtype=torch.float64)], OneRank(1), torch.device("cpu"))
    norms.judge(0.0, 1.0)
    assert not norms.finite
    norms.judge(1.0, 1.0)
    assert norms.finite and norms.coefficient == pytest.approx(1e-20)
    norms.judge(0.0, 2.0**20)  # the loss scale is no part of the gradient
    assert norms.finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_checksum_sees_values_and_places(dtype: torch.dtype) -> None:
    values = torch.randn(70_000).to(dtype)
    swapped = values.clone()
    swapped[[10, 69_000]] = swapped[[69_000, 10]]
    changed = values.clone()
    changed[5] = -changed[5]
    assert torch.equal(checksum(values), checksum(values.clone()))
    assert not torch.equal(checksum(values), checksum(swapped))
    assert not torch.equal(checksum(values), checksum(changed))


def test_problems_name_the_rank_outside_the_majority() -> None:
    everyone = torch.zeros(3, 2, 3, dtype=torch.int64)
    assert _find_problems(everyone, ["a", "b"]) == []
    everyone[2, 1, 0] = 1
    everyone[0, 0, 2] = 7
    assert _find_problems(everyone, ["a", "b"]) == [
        "rank 0: 7 elements of a differ between master and replica",
        "rank 2 holds another b than the others",
    ]


def test_scape_can_be_copied_and_pickled() -> None:
    original = Scape([torch.zeros(3)], sparsity=0.9)
    for twin in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert twin.options == original.options and twin.param_groups[0]["lr"] == original.param_groups[0]["lr"]


def test_a_damaged_installation_of_numba_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only image without a home folder: numba finds no place for its cache and raises RuntimeError at import."""

    def broken(_: str) -> None:
        raise RuntimeError("cannot cache function")

    monkeypatch.setattr(kernels.importlib, "import_module", broken)
    assert kernels._compiled_loops.__wrapped__() is None


def test_run_finds_the_script_behind_the_launchers_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert split_arguments(["--local_rank=1", "train.py", "--x", "y"]) == ("train.py", ["--local_rank=1", "--x", "y"])


def test_a_missing_deepspeed_internal_is_told_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    monkeypatch.delattr(DeepSpeedZeroOptimizer, "process_gradients")
    with pytest.raises(
        ImportError, match=r"lacks DeepSpeedZeroOptimizer.process_gradients.*pip install 'deepspeed>=0.16"
    ):
        register()


def test_registration_is_idempotent() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    before = DeepSpeedEngine._configure_zero_optimizer
    register()
    assert DeepSpeedEngine._configure_zero_optimizer is before
    assert ZERO_SUPPORTED_OPTIMIZERS.count(Scape) == 1
    assert torch.optim.SCAPE is torch.optim.Scape is Scape


def test_kernels_serve_without_deepspeed() -> None:
    """As on a machine that only measures them; what needs DeepSpeed says so."""
    code = (
        "import sys; sys.modules['deepspeed'] = None\n"
        "import torch, deepspeed_scape, deepspeed_scape.kernels.gpu, deepspeed_scape.buffers, evals.kernels\n"
        "from deepspeed_scape.kernels import ops_for\n"
        "print(float(ops_for(torch.ones(3)).sum_squares([torch.ones(3)])))\n"
        "try: deepspeed_scape.register()\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "3.0", "deepspeed is not installed. Remedy: pip install 'deepspeed>=0.16.9,<0.20'"
    ]  # fmt: skip


def test_import_needs_neither_triton_nor_mpi4py_nor_wandb() -> None:
    """In a fresh interpreter where importing them fails, as where they are not installed."""
    code = (
        "import sys\n"
        "for name in ('triton', 'mpi4py', 'wandb', 'transformers', 'datasets'): sys.modules[name] = None\n"
        "import deepspeed_scape, torch; print(torch.optim.SCAPE.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip().endswith("Scape"), done.stderr
