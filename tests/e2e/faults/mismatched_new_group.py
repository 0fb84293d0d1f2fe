"""The ranks do not agree on the members of a group that all of them make."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
members = [1] if rank == 1 else list(range(size))
group = dist.new_group(members)  # waits
if rank != 1:
    dist.all_reduce(torch.ones(1), group=group)
dist.barrier()
