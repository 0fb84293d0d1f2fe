"""A rank thinks that it is done, leaves the world and continues alone; the others have one more step."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(5):  # a few healthy steps
    dist.all_reduce(torch.ones(1))
    time.sleep(0.2)
if dist.get_rank() == 0:
    dist.destroy_process_group()
    time.sleep(3600)  # missing
dist.all_reduce(torch.ones(1))  # waits
