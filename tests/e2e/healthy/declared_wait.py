"""Rank 0 has declared that it waits for samples, and they come before the deadline; the others are in a barrier."""

import os
import queue
import threading

import torch.distributed as dist

import offbeat_liveness as liveness

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    samples: queue.Queue[int] = queue.Queue()
    threading.Timer(float(os.environ["PAUSE_S"]), samples.put, args=[42]).start()
    with liveness.waiting("sample_queue.get", on="rollouter", deadline_s=600):
        assert samples.get() == 42
dist.barrier()
print(f"rank {rank}: done")
