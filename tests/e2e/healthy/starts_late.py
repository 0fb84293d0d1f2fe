"""Rank 0 comes late to init_process_group: its node was still fetching the image."""

import os
import time

import torch.distributed as dist

rank = int(os.environ["RANK"])
if rank == 0:
    time.sleep(float(os.environ["PAUSE_S"]))
dist.init_process_group("gloo")
dist.barrier()
print(f"rank {rank}: done")
