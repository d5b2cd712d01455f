"""The loop with a stand-in for the engine, in a process group of one: order of events, records, exact resume."""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_scape import process_groups
from launch.batches import BatchOrder, count_windows, eval_windows
from launch.cluster import mean_over_ranks, once_per_node
from launch.engine import check_same_run
from launch.loop import Progress, Trainer
from launch.metrics import Record
from launch.tokens import TokenData

SEQ, VOCAB = 8, 32
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    process_groups.destroy()


class Bigram(nn.Module):
    """The smallest language model: a row of logits for each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCAB, VOCAB)

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        return type("Output", (), {"logits": self.table(input_ids)})


class FakeMeter:
    bytes_sent = 0


class FakeEngine:
    """What the loop uses of DeepSpeed's engine; sends 100 pretended bytes a step and 7 a forward outside training."""

    def __init__(self, meter: FakeMeter, accumulation: int) -> None:
        self.module, self.meter, self.accumulation = Bigram(), meter, accumulation
        self.optimizer: Any = torch.optim.SGD(self.module.parameters(), lr=0.5)
        self.optimizer.step_stats = {"bytes_total": 3, "grad_norm": 1.5}
        self.skipped_steps = self.micro_steps = 0
        self.calls: list[str] = []

    def __call__(self, **inputs: Any) -> Any:
        if not self.module.training:
            self.meter.bytes_sent += 7
        return self.module(**inputs)

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()

    def get_global_grad_norm(self) -> None:
        return None

    def backward(self, loss: Tensor) -> None:
        self.calls.append("backward")
        (loss / self.accumulation).backward()

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % self.accumulation == 0:
            self.calls.append("step")
            self.meter.bytes_sent += 100
            self.optimizer.step()
            self.optimizer.zero_grad()


def make_trainer(accumulation: int = 2) -> tuple[Trainer, list[Record]]:
    stream = np.random.default_rng(0).integers(0, VOCAB, 2000).astype(np.uint16)
    data = TokenData(stream[:1500], stream[1500:], {"key": "k"})
    order = BatchOrder(seed=1, windows=count_windows(1500, SEQ), world=1, micro_batch=2, accumulation=accumulation)
    meter, records = FakeMeter(), []
    trainer = Trainer(
        engine=FakeEngine(meter, accumulation),
        data=data,
        order=order,
        eval_batches=eval_windows(count_windows(500, SEQ), 4, 1, 0, 2),
        seq=SEQ,
        device=CPU,
        meter=meter,
        report=records.append,
        tick=lambda: None,
    )
    return trainer, records


def run(trainer: Trainer, steps: int, save: Callable[[Progress], None] = lambda p: None, **changes: int) -> bool:
    options = {"log_every": 1, "eval_every": 0, "save_every": 0} | changes
    return trainer.run(steps=steps, save=save, **options)


def test_records_of_logged_steps() -> None:
    trainer, records = make_trainer()
    assert run(trainer, 7, log_every=3, eval_every=4)
    assert [r["step"] for r in records] == [1, 3, 4, 6, 7]
    assert [r["step"] for r in records if "val_loss" in r] == [4, 7]
    last = records[-1]
    assert last["tokens"] == 7 * 2 * 2 * SEQ
    assert last["bytes_sent"] == 100  # neither the validation's nor the record's own traffic
    assert last["lr"] == 0.5
    assert last["scape/bytes_total"] == 3
    assert last["grad_norm"] is None
    assert last["step_ms"] > 0
    summary = trainer.summary(parameters=5)
    assert summary["bytes_per_step"] == 100
    assert 0 < summary["cpu_ms"] < 1000
    assert summary["final_val_loss"] == last["val_loss"]
    assert summary["best_val_loss"] == min(r["val_loss"] for r in records if "val_loss" in r)


def test_gradient_accumulation_is_one_step_of_the_larger_batch() -> None:
    trainer, _ = make_trainer(accumulation=3)
    run(trainer, 2)
    assert trainer.engine.calls == ["backward"] * 3 + ["step"] + ["backward"] * 3 + ["step"]


def test_resume_goes_on_exactly() -> None:
    whole, records = make_trainer()
    run(whole, 9)
    first, before = make_trainer()
    saved: list[dict[str, Any]] = []

    def save(progress: Progress) -> None:
        saved.append({"progress": vars(progress).copy(), "model": copy.deepcopy(first.engine.module.state_dict())})

    run(first, 5, save, save_every=5)
    second, after = make_trainer()
    second.engine.module.load_state_dict(saved[0]["model"])
    second.progress = Progress(**saved[0]["progress"])
    run(second, 9)
    assert [r["loss"] for r in before + after] == [r["loss"] for r in records]
    assert second.val_loss == whole.val_loss
    assert second.summary(1)["bytes_per_step"] == 100


def test_resume_at_the_last_step_still_has_a_summary() -> None:
    trainer, _ = make_trainer()
    trainer.progress.step = 4
    run(trainer, 4)
    assert math.isfinite(trainer.summary(1)["final_val_loss"])


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    trainer, records = make_trainer()
    with torch.no_grad():
        trainer.engine.module.table.weight.fill_(float("nan"))
    assert not run(trainer, 5)
    assert len(records) == 1


def test_builder_errors_reach_every_rank() -> None:
    def fail() -> str:
        raise ValueError("--data x: gone")

    with pytest.raises(ValueError, match="--data x: gone"):
        once_per_node(fail, local_rank=0)
    assert once_per_node(lambda: "key", local_rank=0) == "key"
    assert mean_over_ranks([1.5, 2.0], CPU) == [1.5, 2.0]


def test_a_checkpoint_of_another_run_is_refused() -> None:
    saved = {"preset": "tiny", "seq_len": 64, "vocab_size": 512, "seed": 0, "tokens_key": "a", "world_size": 2}
    assert check_same_run(saved, saved | {"world_size": 4}) == ["world_size"]
    with pytest.raises(ValueError, match="--seed 1: the checkpoint was made with 0"):
        check_same_run(saved, saved | {"seed": 1})
    with pytest.raises(ValueError, match="--data b"):
        check_same_run(saved, saved | {"tokens_key": "b"})
