"""DDP: a rank throws its loss away, so that its backward never reduces the gradients."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 4))
loss = model(torch.ones(2, 4)).sum()
if dist.get_rank() == 0:
    time.sleep(3600)  # missing
loss.backward()  # waits
dist.barrier()
