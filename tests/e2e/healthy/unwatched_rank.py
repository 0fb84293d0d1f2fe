"""The last rank runs without the monitor and comes late."""

import os
import time

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == dist.get_world_size() - 1:
    time.sleep(float(os.environ["PAUSE_S"]))
dist.barrier()
print(f"rank {rank}: done")
