"""A thread reduces metrics on a group of its own twice a second while the main thread waits for a slow rank."""

import os
import threading
import time

import torch
import torch.distributed as dist


def report() -> None:
    """Reduce as often as on the other ranks."""
    for _ in range(int(2 * pause_s) + 2):
        dist.all_reduce(torch.ones(1), group=metrics)
        time.sleep(0.5)


pause_s = float(os.environ["PAUSE_S"])
dist.init_process_group("gloo")
rank = dist.get_rank()
metrics = dist.new_group(list(range(dist.get_world_size())))
thread = threading.Thread(target=report)
thread.start()
if rank == 0:
    time.sleep(pause_s)
dist.barrier()
thread.join()
print(f"rank {rank}: done")
