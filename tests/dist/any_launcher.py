"""A training script for any launcher that has never heard of SCAPE: DeepSpeed finds the ranks, or asks MPI for them."""

import argparse
import json
import os
import socket
import time

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, help="given by some launchers only")
parser.add_argument("--out", required=True)
parser.add_argument("--port", type=int, default=29500, help="where MPI's ranks meet")
deepspeed.add_config_arguments(parser)
arguments = parser.parse_args()
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # minutes of C++ for nothing
deepspeed.init_distributed("gloo", auto_mpi_discovery=True, distributed_port=arguments.port)
torch.manual_seed(0)
model = torch.nn.Linear(40, 40)
engine = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())[0]
generator = torch.Generator().manual_seed(engine.global_rank)
losses = []
for _ in range(20):
    x = torch.randn(8, 40, generator=generator)
    loss = (engine(x) - x.roll(1, dims=1)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(float(loss))
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
result = {name: os.environ.get(name) for name in names}
result |= {"optimizer": type(engine.optimizer).__name__, "bytes": engine.optimizer.step_stats["bytes_total"]}
result |= {"losses": losses, "host": socket.gethostname()}
with open(f"{arguments.out}.{engine.global_rank}.json", "w") as file:
    json.dump(result, file)
torch.distributed.barrier()
time.sleep(0.2)  # deepspeed_scape/process_groups.py tells why, of which this script does not know
torch.distributed.destroy_process_group()
