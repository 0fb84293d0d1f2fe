"""Rank 0 writes small files, each forced to the disk."""

import os
import tempfile
import time

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    end_s = time.monotonic() + float(os.environ["PAUSE_S"])
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < end_s:
            file.write(bytes(1 << 12))
            file.flush()
            os.fsync(file.fileno())
dist.barrier()
print(f"rank {rank}: done")
