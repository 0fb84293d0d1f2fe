"""A thread saves a checkpoint over a group of its own while the main threads evaluate."""

import os
import threading
import time

import torch.distributed as dist


def save() -> None:
    """Rank 0 writes, then all agree that it is there."""
    if rank == 0:
        time.sleep(pause_s)
    dist.barrier(group=saving)


pause_s = float(os.environ["PAUSE_S"])
dist.init_process_group("gloo")
rank = dist.get_rank()
saving = dist.new_group(list(range(dist.get_world_size())))
thread = threading.Thread(target=save)
thread.start()
end_s = time.monotonic() + pause_s / 2
while time.monotonic() < end_s:
    time.sleep(0.05)  # evaluates
thread.join()
dist.barrier()
print(f"rank {rank}: done")
