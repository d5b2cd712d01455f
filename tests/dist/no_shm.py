"""Run a script without DeepSpeed's shared-memory extension for CPUs, whose first start is minutes of C++.

no_shm.py SCRIPT ARGS...    (the launcher may put --local_rank=N before SCRIPT)
"""

import runpy
import sys

import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
script = next(argument for argument in sys.argv[1:] if argument.endswith(".py"))
sys.argv = [script, *(argument for argument in sys.argv[1:] if argument != script)]
runpy.run_path(script, run_name="__main__")
