"""One run of the sweep: everything that decides its outcome, and the name of its result."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from evals.quality.rules import RULES
from launch.models import PRESETS
from launch.settings import resolve_config

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "evals" / "results" / "quality"
SEQUENCES_OF_EVAL = 800  # windows of held-out text a validation reads, whatever W: as many as evals.first_result
LR_WARMUP = 100  # steps of linear warm-up of the learning rate, as in evals.first_result
LR_FLOOR = 0.1  # where the cosine ends, as a share of the rate: launch/pretrain.py's default


class RunSpec(BaseModel):
    """A run: a shipped configuration with changes, on W simulated ranks.

    Attributes:
        method: its name in tables.
        config: a file of ds_configs/ without its suffix; the optimizer, its options and the clipping come from it.
        overrides: options of ``optimizer.params`` that differ.
        rule: a key of ``rules.RULES``; "" is the package as it is.
        micro_batch: sequences a rank and step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    config: str
    overrides: dict[str, Any] = {}
    rule: str = ""
    preset: str = "small"
    seq: int = 64
    world: int = 2
    micro_batch: int = 2
    steps: int = 8000
    lr: float
    seed: int = 0

    @field_validator("rule")
    @classmethod
    def _known_rule(cls, rule: str) -> str:
        if rule not in RULES:
            raise ValueError(f"there is no rule {rule!r}; take one of {', '.join(map(repr, RULES))}")
        return rule

    @field_validator("preset")
    @classmethod
    def _known_preset(cls, preset: str) -> str:
        if preset not in PRESETS:
            raise ValueError(f"there is no preset {preset!r}; take one of {', '.join(PRESETS)}")
        return preset

    def settings(self) -> dict[str, Any]:
        """The DeepSpeed configuration of this run."""
        path = ROOT / "ds_configs" / f"{self.config}.json"
        changes = [f"optimizer.params.{key}={json.dumps(value)}" for key, value in self.overrides.items()]
        return resolve_config(str(path), changes, lr=self.lr, micro_batch=self.micro_batch)

    @property
    def density(self) -> float:
        """Share of the elements that a step synchronises."""
        return 1.0 - self.settings()["optimizer"]["params"].get("sparsity", 0.0)

    @property
    def visits(self) -> float:
        """How often a mask takes an element, on average; dense steps first do not count."""
        return max(0, self.steps - self.overrides.get("warmup_steps", 0)) * self.density

    @property
    def name(self) -> str:
        """Names the result: readable, and unique by a hash of everything that decides the outcome."""
        decisive = self.model_dump(exclude={"method"})
        digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:6]
        words = [self.config.removeprefix("zero2_").removesuffix("_fp32"), self.rule]
        words += [f"{key}={value}" for key, value in sorted(self.overrides.items())]
        words += [self.preset, f"{self.world}x{self.micro_batch}x{self.seq}", f"{self.steps}", f"lr{self.lr:g}"]
        text = "-".join(word for word in words if word)
        return f"{re.sub(r'[^A-Za-z0-9=.]+', '-', text)}-seed{self.seed}-{digest}"
