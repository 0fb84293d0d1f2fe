"""Two threads use one group; which comes first is decided on each rank alone."""

import threading
import time

import torch
import torch.distributed as dist


def reduce_gradients() -> None:
    """One thread."""
    dist.all_reduce(torch.ones(1))  # waits


def broadcast_request() -> None:
    """The other."""
    dist.broadcast(torch.ones(1), src=0)  # missing


dist.init_process_group("gloo")
order = [reduce_gradients, broadcast_request]
if dist.get_rank() == 0:
    order.reverse()
threads = [threading.Thread(target=work) for work in order]
for thread in threads:
    thread.start()
    time.sleep(2)  # the first is in its call by now, on every rank
for thread in threads:
    thread.join()
dist.barrier()
