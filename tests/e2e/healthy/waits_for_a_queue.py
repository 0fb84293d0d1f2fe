"""Rank 0's main thread takes batches from a queue that a thread fills slowly."""

import os
import queue
import threading
import time

import torch
import torch.distributed as dist

NUM_BATCHES = 3


def feed() -> None:
    """Read, pack, put."""
    for number in range(NUM_BATCHES):
        if rank == 0 and number == 1:
            time.sleep(float(os.environ["PAUSE_S"]))
        batches.put(torch.ones(4))


dist.init_process_group("gloo")
rank = dist.get_rank()
batches: queue.Queue[torch.Tensor] = queue.Queue()
threading.Thread(target=feed, daemon=True).start()
for _ in range(NUM_BATCHES):
    dist.all_reduce(batches.get())
print(f"rank {rank}: done")
