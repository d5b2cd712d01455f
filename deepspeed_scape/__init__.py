"""SCAPE: a DeepSpeed ZeRO-1/2 optimizer that sends 10% or 1% of the gradient.

Importing the package makes ``"optimizer": {"type": "SCAPE", "params": {...}}`` known to DeepSpeed.
"""

import sys

__version__ = "0.1.0"
__all__ = ["AdamS", "AdamSOptions", "Scape", "ScapeConfigError", "ScapeOptions", "register"]

# `python -m deepspeed_scape.plan` imports this package first, and needs neither torch nor DeepSpeed: seconds saved
if "deepspeed_scape.plan" not in sys.orig_argv:
    from deepspeed_scape.adams import AdamS
    from deepspeed_scape.config import AdamSOptions, ScapeConfigError, ScapeOptions
    from deepspeed_scape.optimizer import Scape
    from deepspeed_scape.register import register

    register()
