"""Rank 0 receives from whichever rank is ready first; the others compute for a while before they send."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    for _ in range(dist.get_world_size() - 1):
        dist.recv(torch.zeros(4))
else:
    time.sleep(float(os.environ["PAUSE_S"]))
    dist.send(torch.ones(4), dst=0)
dist.barrier()
print(f"rank {rank}: done")
