"""A source written as rank 0 in a group that does not hold rank 0."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(5):  # a few healthy steps
    dist.all_reduce(torch.ones(1))
    time.sleep(0.2)
rank, size = dist.get_rank(), dist.get_world_size()
replicas = [list(range(size // 2)), list(range(size // 2, size))]
groups = [dist.new_group(replica) for replica in replicas]
mine = groups[rank >= size // 2]
dist.broadcast(torch.ones(1), src=0, group=mine)  # missing: torch refuses it on the second replica
dist.barrier()  # waits
