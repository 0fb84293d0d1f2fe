"""Rank 0 evaluates for a long time; the others are in a barrier."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    end_s = time.monotonic() + float(os.environ["PAUSE_S"])
    hidden = torch.ones(64, 64) / 64
    while time.monotonic() < end_s:
        hidden = hidden @ hidden
        time.sleep(0.02)
dist.barrier()
print(f"rank {rank}: done")
