"""The world is said to be larger than the ranks that start."""

import os

import torch.distributed as dist

dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]) + 1)  # waits
