"""No rank is in a call of torch: each waits in a queue for work that comes after a while."""

import os
import queue
import threading

import torch.distributed as dist

dist.init_process_group("gloo")
work: queue.Queue[str] = queue.Queue()
threading.Timer(float(os.environ["PAUSE_S"]), work.put, args=["batch"]).start()
assert work.get() == "batch"
dist.barrier()
print(f"rank {dist.get_rank()}: done")
