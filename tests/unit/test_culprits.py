"""What DeepSpeed's own configuration refuses: every key of it, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_scape import ScapeConfigError, initialize
from deepspeed_scape.culprits import refused_by_deepspeed
from tests.unit.test_document import GOOD

WRONG: dict[str, Any] = {
    "zero_optimization.overlap_com": True,
    "zero_optimization.allgather_bucket_size": "x",
    "zero_optimization.offload_optimizer.pin_memry": True,
    "comms_logger.enabled": 2,
    "tensorboard.enabled": "x",
    "wandb.projekt": "x",
    "checkpoint.tag_validation": "Maybe",
    "communication_data_type": "fp99",
}


def documented(*keys: str) -> dict[str, Any]:
    """A good document with some of WRONG."""
    built: dict[str, Any] = {**GOOD, "zero_optimization": {"stage": 2}}
    for key in keys:
        *sections, name = key.split(".")
        node = built
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = WRONG[key]
    return built


def test_a_good_document_is_read() -> None:
    found, config = refused_by_deepspeed(GOOD, [])
    assert not found and config.zero_config.stage == 2


@pytest.mark.parametrize("key", WRONG)
def test_one_mistake_is_told_by_its_own_key(key: str) -> None:
    (refusal,), config = refused_by_deepspeed(documented(key), [])
    assert refusal[:2] == (key, WRONG[key]) and refusal[2] and refusal[3] and config is not None


def test_all_mistakes_are_told_and_the_rest_is_read() -> None:
    found, config = refused_by_deepspeed(documented(*WRONG), [])
    assert {key: value for key, value, *_ in found} == WRONG and config.zero_config.stage == 2
    left, _ = refused_by_deepspeed(documented(*WRONG), found[1:])
    assert left == found[:1]


def test_what_only_the_engine_refuses_is_told_with_it() -> None:
    document = documented("comms_logger.enabled", "zero_optimization.overlap_com")
    document["zero_optimization"]["stage"] = 3
    document["sequence_parallel_size"] = 2
    first = ScapeConfigError("train_batch_size", 7, "does not go", "change it")
    told = {key: value for key, value, *_ in initialize.with_others(first, document).refusals}
    assert told == {
        "train_batch_size": 7,
        "comms_logger.enabled": 2,
        "zero_optimization.overlap_com": True,
        "zero_optimization.stage": 3,
        "sequence_parallel_size": 2,
    }


def test_nothing_is_blamed_where_no_key_is() -> None:
    def beside() -> None:
        raise AssertionError("out of memory")

    try:
        beside()
    except AssertionError as error:
        assert initialize.rephrase(error, documented("comms_logger.enabled")) is None
