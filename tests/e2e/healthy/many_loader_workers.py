"""Rank 0 starts very many loader workers, whose first batch takes a while."""

import os
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

NUM_WORKERS = int(os.environ.get("NUM_WORKERS", "48"))


class Pictures(Dataset[torch.Tensor]):
    """The first one is slow."""

    def __len__(self) -> int:
        return NUM_WORKERS

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            time.sleep(float(os.environ["PAUSE_S"]))
        return torch.ones(1)


dist.init_process_group("gloo")
rank = dist.get_rank()
seen = torch.zeros(1)
if rank == 0:
    for batch in DataLoader(Pictures(), batch_size=1, num_workers=NUM_WORKERS):
        seen += batch[0]
dist.broadcast(seen, src=0)
assert seen.item() == NUM_WORKERS
print(f"rank {rank}: done")
