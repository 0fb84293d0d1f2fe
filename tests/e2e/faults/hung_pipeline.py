"""A stage of a pipeline never sends what the next stage has posted a receive for."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
block = torch.ones(4)
if rank == 0:
    time.sleep(3600)  # missing
for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, block, rank - 1)]):
    work.wait()  # waits
if rank < size - 1:
    dist.send(block, dst=rank + 1)
