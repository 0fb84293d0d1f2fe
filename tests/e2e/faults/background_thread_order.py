"""A thread in the background uses one group and the main thread another; one rank joins the thread first."""

import threading
import time

import torch
import torch.distributed as dist


def save() -> None:
    """Agree on the checkpoint."""
    dist.all_reduce(torch.ones(1), group=saving)  # waits


dist.init_process_group("gloo")
saving = dist.new_group(list(range(dist.get_world_size())))
thread = threading.Thread(target=save, name="saver")
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(1))  # missing
    thread.start()
else:
    time.sleep(0.2)
    thread.start()
    thread.join()  # waits
    dist.all_reduce(torch.ones(1))
thread.join()
