"""A trainer takes samples from a queue that no process fills: the rollouter sleeps."""

import queue
import time

import torch.distributed as dist

import offbeat_liveness as liveness

dist.init_process_group("gloo")
samples: queue.Queue[int] = queue.Queue()
if dist.get_rank() == 0:
    time.sleep(3600)  # missing
elif dist.get_rank() == 1:
    with liveness.waiting("sample_queue.get", on="rank 0", deadline_s=3600):
        samples.get()  # waits
dist.barrier()  # waits
