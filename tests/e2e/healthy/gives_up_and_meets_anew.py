"""A rank gives up a reduction after a timeout of its own; all leave that world and meet in another."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, pause_s = dist.get_rank(), float(os.environ["PAUSE_S"])
if rank == 0:
    time.sleep(pause_s)
else:
    try:
        dist.all_reduce(torch.ones(1), async_op=True).wait(timedelta(seconds=0.6 * pause_s))
    except RuntimeError:
        time.sleep(0.45 * pause_s)  # a little longer than the other rank sleeps
dist.destroy_process_group()
own = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("again", own)
dist.init_process_group("gloo", store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
dist.barrier()
print(f"rank {rank}: done")
