"""Rank 0 is in a call into C that keeps the GIL, so that no other thread of it can answer."""

import ctypes
import os

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    ctypes.PyDLL(None).usleep(int(float(os.environ["PAUSE_S"]) * 1e6))
dist.barrier()
print(f"rank {rank}: done")
