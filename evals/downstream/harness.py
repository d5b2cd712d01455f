"""lm-eval on one model: its own metrics of each task, and what it says of every single item."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIP = "pip install 'deepspeed-scape[eval]'"
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE")


@dataclass(frozen=True)
class TaskResult:
    """One checkpoint on one task. The arrays have one entry for every item, in the order of the file."""

    metrics: dict[str, float]  # lm-eval's own: acc, acc_stderr, acc_norm, ...
    correct: NDArray[np.float64]  # (n,) 0 or 1
    loglikelihood: NDArray[np.float64]  # (n,) of the right answer given its context, nats
    cut: float  # share of the requests whose context did not fit the model and lost its beginning


def require() -> None:
    """Raises ValueError with the pip command if lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(f"lm-eval is not installed; {PIP}")


def go_offline(cache: Path) -> None:
    """Keep `datasets` and the hub off the network, and their files in `cache`. Call before they are imported."""
    os.environ |= dict.fromkeys(OFFLINE, "1")
    os.environ |= {"HF_DATASETS_CACHE": str(cache / "datasets"), "TOKENIZERS_PARALLELISM": "false"}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Neither progress bars nor the harness's notes on models that were handed to it ready-made."""
    import logging

    import datasets

    datasets.disable_progress_bars()
    loggers = [logging.getLogger(name) for name in ("lm_eval", "lm-eval")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def evaluate(
    model: Any, tokenizer: Any, folder: Path, tasks: list[str], *, seq: int, limit: int | None, batch_size: int
) -> dict[str, TaskResult]:
    """Run `tasks` of the prepared `folder` on a model of `seq` positions; longer texts lose their beginning."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from evals.downstream.windows import WindowedLM

    with _quiet():
        lm = WindowedLM(pretrained=model, tokenizer=tokenizer, max_length=seq, batch_size=batch_size, device="cpu")
        found = simple_evaluate(
            model=lm,
            tasks=list(tasks),
            num_fewshot=0,
            limit=limit,
            bootstrap_iters=100,  # of the error of perplexity alone
            log_samples=True,
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        )
    assert found is not None  # only ranks other than 0 get nothing
    return {task: _result(found["results"][task], found["samples"][task], tokenizer, seq) for task in tasks}


def _result(metrics: dict[str, Any], samples: list[dict[str, Any]], tokenizer: Any, seq: int) -> TaskResult:
    samples = sorted(samples, key=lambda sample: sample["doc_id"])
    right = [sample["filtered_resps"][int(sample["doc"].get("gold", 0))] for sample in samples]
    requests = [str(context) + str(answer) for sample in samples for context, answer in sample["arguments"]]
    lengths = [len(ids) for ids in tokenizer(requests)["input_ids"]]
    return TaskResult(
        metrics={k.removesuffix(",none"): float(v) for k, v in metrics.items() if isinstance(v, int | float)},
        correct=np.array([float(sample["acc"]) for sample in samples]),
        loglikelihood=np.array([float(answer[0]) for answer in right]),
        cut=float(np.mean([length > seq + 1 for length in lengths])),  # the last token is only predicted
    )
