"""Rank 0's logger is refused by its server and tries again after longer and longer rests."""

import os
import socket
import time

import torch.distributed as dist


def log() -> bool:
    """Return whether the server took it; no server listens."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", 9)) == 0


dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    rest_s, end_s = 0.1, time.monotonic() + float(os.environ["PAUSE_S"])
    while not log() and time.monotonic() < end_s:
        time.sleep(rest_s)
        rest_s *= 2
dist.barrier()
print(f"rank {rank}: done")
