"""A world made of a TCPStore alone, as engines make it to meet a trainer; one side comes late."""

import os
import time
from datetime import timedelta

import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
timeout = timedelta(minutes=5)
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    agent.set("stateless-port", str(store.port))
else:
    store = dist.TCPStore("127.0.0.1", int(agent.get("stateless-port")), is_master=False, timeout=timeout)
if rank == size - 1:
    time.sleep(float(os.environ["PAUSE_S"]))
store.set(f"here/{rank}", "1")
store.wait([f"here/{each}" for each in range(size)])
store.set(f"left/{rank}", "1")
if rank == 0:  # it holds the store
    store.wait([f"left/{each}" for each in range(size)])
    time.sleep(0.5)
print(f"rank {rank}: done")
