"""Ranks run as many steps as they have data."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
num_batches = 3 if dist.get_rank() == 0 else 4
for _ in range(num_batches):
    dist.all_reduce(torch.ones(1024))  # waits
dist.barrier()  # missing
