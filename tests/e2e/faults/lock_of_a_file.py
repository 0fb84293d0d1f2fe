"""Rank 1 holds the lock of a cache's file over a barrier; rank 0 wants that lock before it comes."""

import fcntl
import tempfile
from pathlib import Path

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
folders = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(folders, src=0)
with (Path(folders[0]) / "cache.lock").open("a") as file:
    if rank == 1:
        fcntl.flock(file, fcntl.LOCK_EX)
    dist.barrier()
    if rank == 0:
        fcntl.flock(file, fcntl.LOCK_EX)  # missing
    dist.barrier()  # waits
