"""A rank never comes to the collective of the main threads, while a side thread's group continues as before."""

import threading
import time

import torch
import torch.distributed as dist


def report() -> None:
    """Reduce metrics for as long as all do."""
    while True:
        dist.all_reduce(torch.ones(1), group=metrics)
        time.sleep(0.5)


dist.init_process_group("gloo")
metrics = dist.new_group(list(range(dist.get_world_size())))
threading.Thread(target=report, daemon=True).start()
if dist.get_rank() == 0:
    time.sleep(3600)  # missing
dist.all_reduce(torch.ones(1))  # waits
