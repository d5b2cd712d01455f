"""Groups are given back without the deadlock of gloo under torch before 2.8."""

from __future__ import annotations

import subprocess
import sys

ROUNDS = 30  # with torch 2.6 alone 4 to 23 rounds were the end
SCRIPT = f"""
import torch
import torch.distributed as dist
from deepspeed_scape import process_groups

def reduce(group):
    value = torch.ones(3)  # Python lets go of it first, so the thread that has reduced it must free it
    dist.all_reduce(value, group=group)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range({ROUNDS}):
    group = dist.new_group(backend="gloo")
    reduce(group)
    process_groups.destroy(group)
    del group
reduce(None)
process_groups.destroy()
print("ended", dist.is_initialized())
"""


def test_a_group_ends_right_after_its_last_collective() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("ended False\n"), done.stderr
