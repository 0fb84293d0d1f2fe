"""Rank 0 saves a model with torch.save to a slow place while the others are in a barrier."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn


class SlowFile:
    """A file object of a remote store: each write is a request."""

    def __init__(self, rest_s: float) -> None:
        self.rest_s, self.num_bytes = rest_s, 0

    def write(self, data: bytes) -> int:
        """Send it."""
        time.sleep(self.rest_s)
        self.num_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is kept back."""


dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    file = SlowFile(float(os.environ["PAUSE_S"]) / 20)
    torch.save(nn.Linear(64, 64).state_dict(), file)
    assert file.num_bytes > 64 * 64 * 4
dist.barrier()
print(f"rank {rank}: done")
