"""A rank that raised waits in a barrier of its clean-up for ranks that wait for it."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
try:
    if dist.get_rank() == 0:
        raise ValueError("bad batch")
    dist.all_reduce(torch.ones(1))  # waits
finally:
    dist.barrier()  # missing
