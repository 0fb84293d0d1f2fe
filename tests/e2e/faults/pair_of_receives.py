"""Two ranks each receive from the other before they send; the rest wait for them in a barrier."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
block = torch.ones(1)
if rank < 2:
    dist.irecv(block, src=1 - rank).wait()  # waits
    dist.isend(block, dst=1 - rank).wait()
dist.barrier()  # waits
