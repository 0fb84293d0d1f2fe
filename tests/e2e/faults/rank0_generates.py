"""Rank 0 generates for a long time; the others wait for its result. Slow, but moving: no rank must be killed."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    end_s = time.monotonic() + 6.0
    hidden = torch.ones(256, 256) / 256
    while time.monotonic() < end_s:
        hidden = hidden @ hidden  # missing
dist.broadcast(torch.ones(1), src=0)  # waits
dist.barrier()
