"""A rank raises between two collectives."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(5):  # a few healthy steps
    dist.all_reduce(torch.ones(1))
    time.sleep(0.2)
if dist.get_rank() == 1:
    raise RuntimeError("no space left on device")  # missing
dist.all_reduce(torch.ones(1))  # waits
