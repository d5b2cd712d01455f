"""A training script that has never heard of SCAPE; test_switch.py runs it through ``deepspeed_scape.run``."""

import argparse
import json
import os

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--steps", type=int)
deepspeed.add_config_arguments(parser)
arguments = parser.parse_args()
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.manual_seed(0)
model = torch.nn.Linear(40, 40)
engine = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())[0]
generator = torch.Generator().manual_seed(arguments.local_rank)
for _ in range(arguments.steps):
    x = torch.randn(8, 40, generator=generator)
    loss = (engine(x) - x.roll(1, dims=1)).square().mean()
    engine.backward(loss)
    engine.step()
result = {"optimizer": type(engine.optimizer).__name__, "loss": float(loss), "name": __name__,
          "bytes": engine.optimizer.step_stats["bytes_total"]}  # fmt: skip
path = f"{os.environ['SCAPE_TEST_OUT']}.{engine.global_rank}.json"
with open(path, "w") as file:
    json.dump(result, file)
