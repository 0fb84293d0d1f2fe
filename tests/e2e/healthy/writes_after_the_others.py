"""All ranks leave in order; rank 0 alone stays to write the last checkpoint."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
if rank == 0:
    time.sleep(float(os.environ["PAUSE_S"]))
print(f"rank {rank}: done")
