"""A user stops rank 1 and continues it after a while."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
end_s = time.monotonic() + 1.5 * float(os.environ["PAUSE_S"])
overlaps = torch.ones(1)
while overlaps.item():
    overlaps.fill_(time.monotonic() < end_s)
    dist.all_reduce(overlaps, op=dist.ReduceOp.MIN)
    time.sleep(0.05)
print(f"rank {dist.get_rank()}: done")
