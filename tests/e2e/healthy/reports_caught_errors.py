"""Rank 0 prints errors that it has caught by `sys.excepthook`, and tries again; a thread of the last rank does so."""

import os
import sys
import threading
import time

import torch
import torch.distributed as dist


def read_shard():
    """A file system that is away for a moment."""
    raise OSError("stale file handle")


def send_metrics():
    """A server that is away."""
    raise ConnectionError("metrics server is away")


class MetricsThread(threading.Thread):
    """Use the well-known recipe by which the main thread's hook reports errors of other threads."""

    def run(self):
        try:
            send_metrics()
        except ConnectionError:
            sys.excepthook(*sys.exc_info())


dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
if rank == 0:
    for _ in range(2):
        time.sleep(float(os.environ["PAUSE_S"]) / 3)
        try:
            read_shard()
        except OSError:
            sys.excepthook(*sys.exc_info())
    time.sleep(float(os.environ["PAUSE_S"]) / 3)
dist.barrier()
if rank == dist.get_world_size() - 1:
    time.sleep(float(os.environ["PAUSE_S"]) / 3)
    MetricsThread().start()
    time.sleep(float(os.environ["PAUSE_S"]))
dist.barrier()
dist.destroy_process_group()
print(f"rank {rank}: done", flush=True)
