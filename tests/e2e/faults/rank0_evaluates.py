"""Rank 0 evaluates a wrapped model, whose forward broadcasts its buffers to ranks that are at the barrier."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
model(torch.ones(2, 4)).sum().backward()
if dist.get_rank() == 0:
    model(torch.ones(2, 4))  # waits
dist.barrier()  # missing
