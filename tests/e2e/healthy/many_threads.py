"""Rank 0 has hundreds of threads that wait for requests, and is late itself."""

import os
import threading
import time

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ended = threading.Event()
threads = [threading.Thread(target=ended.wait) for _ in range(200 if rank == 0 else 0)]
for thread in threads:
    thread.start()
if rank == 0:
    time.sleep(float(os.environ["PAUSE_S"]))
dist.barrier()
ended.set()
print(f"rank {rank}: done")
