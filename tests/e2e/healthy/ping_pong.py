"""Ranks 0 and 1 exchange blocks for a while; the others already wait in the barrier behind it."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for _ in range(5):
    dist.all_reduce(torch.ones(1))
if rank < 2:
    block, other = torch.ones(1), 1 - rank
    for _ in range(int(float(os.environ["PAUSE_S"]) / 0.05)):
        if rank == 0:
            time.sleep(0.05)
            dist.send(block, dst=other)
            dist.recv(block, src=other)
        else:
            dist.recv(block, src=other)
            dist.send(block, dst=other)
dist.barrier()
print(f"rank {rank}: done")
