"""SCAPE: DeepSpeed ZeRO-1/2 training that sends 10% or 1% of the gradient per step.

Importing the package makes ``"optimizer": {"type": "SCAPE", "params": {...}}`` known to DeepSpeed.
"""

import sys
from importlib.util import find_spec

__version__ = "0.1.0"
__all__ = ["AdamS", "AdamSOptions", "Scape", "ScapeConfigError", "ScapeOptions", "register"]

# `python -m deepspeed_scape.plan` imports this package first, and needs neither torch nor DeepSpeed: seconds saved
if "deepspeed_scape.plan" not in sys.orig_argv:
    from deepspeed_scape.adams import AdamS
    from deepspeed_scape.config import AdamSOptions, ScapeConfigError, ScapeOptions
    from deepspeed_scape.optimizer import Scape

    if find_spec("deepspeed") is not None:
        from deepspeed_scape.register import register

        register()
    else:  # kernels and pure functions serve without it, as on a machine that only measures them

        def register() -> None:
            """Not without DeepSpeed.

            Raises:
                ImportError: always.
            """
            raise ImportError("deepspeed is not installed. Remedy: pip install 'deepspeed>=0.16.9,<0.20'")
