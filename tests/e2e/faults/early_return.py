"""A rank whose batch is empty returns before the collective and then waits for input."""

import time

import torch
import torch.distributed as dist


def entropy(num_tokens: int) -> None:
    """Gather the entropies of all ranks."""
    if num_tokens == 0:
        return
    dist.all_reduce(torch.ones(1))  # waits


dist.init_process_group("gloo")
entropy(num_tokens=dist.get_rank())
if dist.get_rank() == 0:
    time.sleep(3600)  # missing
dist.barrier()
