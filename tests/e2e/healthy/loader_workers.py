"""Rank 0's DataLoader workers take long over a batch: a picture to decode, a file that is cold."""

import os
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset[torch.Tensor]):
    """Slow on rank 0."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if dist.get_rank() == 0 and index == 2:
            time.sleep(float(os.environ["PAUSE_S"]))
        return torch.ones(4)


dist.init_process_group("gloo")
for batch in DataLoader(Pictures(), batch_size=2, num_workers=2):
    dist.all_reduce(batch)
print(f"rank {dist.get_rank()}: done")
