"""One rank reduces in float64, the others in float32."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(5):  # a few healthy steps
    dist.all_reduce(torch.ones(1))
    time.sleep(0.2)
dtype = torch.float64 if dist.get_rank() == 0 else torch.float32
dist.all_reduce(torch.ones(1000, dtype=dtype))  # waits
dist.barrier()
