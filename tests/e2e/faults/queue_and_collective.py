"""The trainer waits for a sample; the rollouter, which should bring it, waits for the trainer in a collective."""

import queue

import torch
import torch.distributed as dist

import offbeat_liveness as liveness

dist.init_process_group("gloo")
samples: queue.Queue[int] = queue.Queue()
if dist.get_rank() == 0:
    with liveness.waiting("sample_queue.get", on="rank 1", deadline_s=3600):
        samples.get()  # missing
dist.all_reduce(torch.ones(1))  # waits
