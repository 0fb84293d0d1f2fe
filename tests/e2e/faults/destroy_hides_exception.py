"""A rank raised; its clean-up leaves the world, and takes long, before the exception is printed."""

import time

import torch
import torch.distributed as dist


def train(rank: int) -> None:
    """A step."""
    if rank == 0:
        raise ValueError("loss is nan")
    dist.all_reduce(torch.ones(1))  # waits


dist.init_process_group("gloo")
for _ in range(5):  # a few healthy steps
    dist.barrier()
    time.sleep(0.2)
try:
    train(dist.get_rank())
finally:
    if dist.get_rank() == 0:
        dist.destroy_process_group()
        time.sleep(3600)  # missing
