"""Rank 0 alone finds that the checkpoint is there already, and raises; the others wait for it."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(5):  # a few healthy steps
    dist.all_reduce(torch.ones(1))
    time.sleep(0.2)
if dist.get_rank() == 0:
    raise FileExistsError("step-100 is there already")  # missing
dist.barrier()  # waits
