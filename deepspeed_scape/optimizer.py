"""The torch optimizer that stands for SCAPE in DeepSpeed's configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed_scape.config import SCAPE_ONLY, AdamSOptions, ScapeConfigError, ScapeOptions, parse_options


class Scape(torch.optim.Optimizer):
    """Holds the parameter groups and the options; the steps are taken by the ZeRO subclass that DeepSpeed builds.

    Args:
        params: tensors or parameter groups; each group may set its own lr, betas, eps and weight_decay.
        options: see :class:`deepspeed_scape.config.ScapeOptions`.

    Raises:
        ScapeConfigError: an unknown option or one out of range, also inside a group.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        self.options: ScapeOptions = parse_options(options, ScapeOptions)
        per_group = {name: getattr(self.options, name) for name in AdamSOptions.model_fields}
        super().__init__(params, per_group)
        for i, group in enumerate(self.param_groups):
            for name in sorted(SCAPE_ONLY & set(group)):
                raise ScapeConfigError(
                    f"param_groups[{i}].{name}", group[name], "holds for the whole run", "set it in optimizer.params"
                )
            own = {name: group[name] for name in AdamSOptions.model_fields}
            parse_options(own, AdamSOptions, f"param_groups[{i}]")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "options" in state:  # torch calls this for a loaded state_dict too, which has none
            self.options = state.pop("options")
        super().__setstate__(state)

    def step(self, closure: Any = None) -> Any:
        """Not for use alone.

        Raises:
            RuntimeError: always; SCAPE needs the partitions and process groups of DeepSpeed ZeRO.
        """
        raise RuntimeError(
            "Scape.step() was called outside DeepSpeed ZeRO. Pass the optimizer to deepspeed.initialize with "
            '"zero_optimization": {"stage": 1 or 2}; as a plain torch optimizer use deepspeed_scape.AdamS'
        )
