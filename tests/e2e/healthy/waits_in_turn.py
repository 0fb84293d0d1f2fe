"""The ranks load the model one after the other, to save memory: a barrier between any two."""

import os
import time

import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for turn in range(size):
    if rank == turn:
        time.sleep(float(os.environ["PAUSE_S"]) / size)
    dist.barrier()
print(f"rank {rank}: done")
