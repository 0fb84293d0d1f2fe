"""Rank 0 evaluates after each epoch, always alike: the report of the first time need not be repeated."""

import os
import time

import torch
import torch.distributed as dist

NUM_EPOCHS = 4

dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(NUM_EPOCHS):
    for _ in range(5):
        dist.all_reduce(torch.ones(4))
    if rank == 0:
        time.sleep(float(os.environ["PAUSE_S"]) / 2)
    dist.barrier()
print(f"rank {rank}: done")
