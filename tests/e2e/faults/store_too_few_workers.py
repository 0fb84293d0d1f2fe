"""A store of the program's own is to wait for one worker more than there are."""

import os
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
timeout = timedelta(seconds=float(os.environ.get("STORE_TIMEOUT_S", "3600")))
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, size + 1, is_master=True, timeout=timeout)  # waits
dist.barrier()  # waits
