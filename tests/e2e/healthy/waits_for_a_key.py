"""The ranks wait at a store of their own for a key that rank 0 sets when its server is up."""

import os
import time
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.PrefixStore("server", dist.TCPStore(*address, is_master=False, timeout=timedelta(minutes=30)))
if rank == 0:
    time.sleep(float(os.environ["PAUSE_S"]))
    store.set("url", "ready")
assert store.get("url") == b"ready"
dist.barrier()
print(f"rank {rank}: done")
