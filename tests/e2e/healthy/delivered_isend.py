"""Rank 0 has sent a block that has arrived, keeps the handle for later, and is busy; the others are in a barrier."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
block = torch.ones(1)
if rank == 0:
    handle = dist.isend(block, dst=1)
elif rank == 1:
    dist.recv(block, src=0)
if rank == 0:
    time.sleep(float(os.environ["PAUSE_S"]))
dist.barrier()
if rank == 0:
    handle.wait()
print(f"rank {rank}: done")
