"""Ranks 0 and 1 exchange blocks without a pause; the others already wait in the barrier behind it."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for _ in range(5):
    dist.all_reduce(torch.ones(1))
end_s = time.monotonic() + float(os.environ["PAUSE_S"])
overlaps = torch.ones(1)
while rank < 2 and overlaps.item():
    if rank == 0:
        overlaps.fill_(time.monotonic() < end_s)
        dist.send(overlaps, dst=1)
        dist.recv(torch.zeros(1), src=1)
    else:
        dist.recv(overlaps, src=0)
        dist.send(torch.ones(1), dst=0)
dist.barrier()
print(f"rank {rank}: done")
