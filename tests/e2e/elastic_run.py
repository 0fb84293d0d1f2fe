"""A program that a launcher may start again: it trains until an agent is killed, and then has a long pause and ends.

It reads two environment variables: FOLDER, where "second" means that the agent was killed, and PAUSE_S.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), Path(os.environ["FOLDER"])
if not (folder / "second").exists():
    (folder / f"first-{rank}").touch()
    while True:
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)
(folder / f"restarts-{rank}").write_text(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"rank {rank}: begins anew", flush=True)
for _ in range(3):
    dist.all_reduce(torch.ones(1))
if rank == 0:
    time.sleep(float(os.environ["PAUSE_S"]))
dist.barrier()
print(f"rank {rank}: done", flush=True)
