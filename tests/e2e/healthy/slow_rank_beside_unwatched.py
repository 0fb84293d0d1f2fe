"""The last rank runs without the monitor and is in the barrier; rank 0 computes, and is late."""

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
dist.barrier()
print(f"rank {rank}: done")
