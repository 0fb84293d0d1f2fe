"""Every rank receives from its neighbour before it sends."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
block = torch.ones(1)
dist.recv(block, src=(rank - 1) % size)  # waits
dist.send(block, dst=(rank + 1) % size)
