"""Rank 0 waits for a command that uses no core here: a copy to a bucket, a job of another scheduler."""

import os
import subprocess

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    subprocess.run(["sleep", os.environ["PAUSE_S"]], check=True)
dist.barrier()
print(f"rank {rank}: done")
