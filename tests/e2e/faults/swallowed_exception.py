"""A rank whose batch is bad logs it and takes the next one, without its share of the collective."""

import time

import torch
import torch.distributed as dist


def load_batch(step: int) -> None:
    """Bad on one rank."""
    if step == 1 and dist.get_rank() == 0:
        raise ValueError("bad batch")


dist.init_process_group("gloo")
for step in range(3):
    try:
        load_batch(step)
        dist.all_reduce(torch.ones(1))  # waits
    except ValueError:
        time.sleep(3600)  # missing
