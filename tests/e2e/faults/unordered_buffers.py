"""Buffers are broadcast one by one, in an order that one rank does not share."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(5):  # a few healthy steps
    dist.all_reduce(torch.ones(1))
    time.sleep(0.2)
buffers = [torch.ones(4), torch.ones(1 << 20), torch.ones(16)]
if dist.get_rank() == 0:
    buffers.reverse()
for buffer in buffers:
    dist.all_reduce(buffer)  # waits
dist.barrier()
