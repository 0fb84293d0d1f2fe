"""Rank 0 prepares the data with a pool of processes before the others, which wait at a barrier, read its cache."""

import multiprocessing
import os
import time

import torch.distributed as dist


def tokenize(number: int) -> int:
    """One shard; computes for a share of the pause."""
    end_s = time.monotonic() + float(os.environ["PAUSE_S"]) / 2
    while time.monotonic() < end_s:
        sum(range(1000))
        time.sleep(0.01)
    return number


dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    with multiprocessing.Pool(2) as pool:
        shards = pool.map(tokenize, range(4), chunksize=1)
    assert shards == list(range(4))
dist.barrier()
print(f"rank {rank}: done")
