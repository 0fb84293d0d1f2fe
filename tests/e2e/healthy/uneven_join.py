"""Ranks with unequal data end their epoch under Join; the one with most of it is slow."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(4, 4))
num_batches = 6 if rank == 0 else 2
with Join([model]):
    for number in range(num_batches):
        if rank == 0 and number == 4:
            time.sleep(float(os.environ["PAUSE_S"]))
        model(torch.ones(2, 4)).sum().backward()
print(f"rank {rank}: done")
