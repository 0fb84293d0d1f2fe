"""DDP with parameters that not every batch uses, in epochs of unequal length, with one slow batch."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Experts(nn.Module):
    """Two experts; each batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        """The chosen one."""
        return self.experts[chosen](x)


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(Experts(), find_unused_parameters=True)
for epoch in range(2):
    with model.join():
        for number in range(2 + (rank + epoch) % 2):
            if rank == 1 and epoch == number == 1:
                time.sleep(float(os.environ["PAUSE_S"]))
            model(torch.ones(2, 4), number % 2).sum().backward()
print(f"rank {rank}: done")
