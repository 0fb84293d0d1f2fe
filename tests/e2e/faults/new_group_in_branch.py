"""A group is made by the ranks that will use it; torch wants every rank of the world."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    group = dist.new_group([0, 1])  # waits
    dist.all_reduce(torch.ones(1), group=group)
dist.barrier()  # missing
