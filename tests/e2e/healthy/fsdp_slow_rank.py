"""FSDP2 with one rank whose batches take longer."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    if rank == 0:
        time.sleep(float(os.environ["PAUSE_S"]) / 2)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {rank}: done")
