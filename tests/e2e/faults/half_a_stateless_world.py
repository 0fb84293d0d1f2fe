"""A world made of a TCPStore alone, whose other side never comes."""

import os
import time
from datetime import timedelta

import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
timeout = timedelta(seconds=float(os.environ.get("STORE_TIMEOUT_S", "3600")))
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.PrefixStore("stateless", dist.TCPStore(*address, is_master=False, timeout=timeout))
if rank == 0:
    time.sleep(3600)  # missing
store.set(f"here/{rank}", "1")
store.get("here/0")  # waits
