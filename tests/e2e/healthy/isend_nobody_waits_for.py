"""Rank 0 posts a block early that rank 1 fetches last, after a long pause."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
block = torch.ones(1)
if rank == 0:
    handle = dist.isend(block, dst=1)
if rank == 1:
    time.sleep(float(os.environ["PAUSE_S"]))
dist.barrier()
if rank == 1:
    dist.recv(block, src=0)
dist.barrier()
print(f"rank {rank}: done")
