"""Settings for every test."""

import os

import torch
from hypothesis import settings

# an example that compiles, or meets a busy machine, is not a failure
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")

# where there is no GPU, kernels run in Triton's interpreter: its variable must be set before Triton is imported
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
