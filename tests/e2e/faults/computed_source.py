"""A source computed from the rank: the members of one group do not agree on it."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
dist.barrier()
source = (rank + 1) % size
dist.broadcast(torch.ones(1), src=source)  # waits
