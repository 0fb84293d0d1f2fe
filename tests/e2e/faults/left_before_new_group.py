"""A rank leaves the world and continues alone before the others make their last group."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    dist.destroy_process_group()
    time.sleep(3600)  # missing
dist.new_group(list(range(dist.get_world_size())))  # waits
