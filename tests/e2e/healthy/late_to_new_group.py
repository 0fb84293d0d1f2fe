"""All ranks make a group; rank 0 loads a tokenizer first."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    time.sleep(float(os.environ["PAUSE_S"]))
group = dist.new_group(list(range(dist.get_world_size())))
dist.all_reduce(torch.ones(1), group=group)
print(f"rank {rank}: done")
