"""Rank 0 packs a large object before the others get anything of it."""

import os
import time

import torch.distributed as dist


class Sample:
    """Takes long to pack."""

    def __reduce__(self) -> tuple[type, tuple[int, ...]]:
        time.sleep(float(os.environ["PAUSE_S"]) / 20)
        return int, (1,)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
everything: list[list[int]] = [[] for _ in range(size)]
dist.all_gather_object(everything, [Sample() for _ in range(20)] if rank == 0 else [])
assert sum(everything[0]) == 20
print(f"rank {rank}: done")
