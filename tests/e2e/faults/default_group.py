"""A reduction without its group: over the whole world, which the other stage never joins."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
first, last = list(range(size // 2)), list(range(size // 2, size))
groups = [dist.new_group(first), dist.new_group(last)]
if rank in last:
    dist.all_reduce(torch.ones(1))  # waits
else:
    dist.recv(torch.ones(1), src=size - 1)  # missing
