"""The last batch of one rank is shorter, and its activations are gathered as they are."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(5):  # a few healthy steps
    dist.all_reduce(torch.ones(1))
    time.sleep(0.2)
rank, size = dist.get_rank(), dist.get_world_size()
length = 1000 if rank == 0 else 4000
dist.all_gather([torch.zeros(length) for _ in range(size)], torch.ones(length))  # waits
dist.barrier()
