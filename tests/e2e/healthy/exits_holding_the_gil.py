"""The main thread holds the GIL until the interpreter ends."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.barrier()
print(f"rank {dist.get_rank()}: done", flush=True)
end_s = time.monotonic() + float(os.environ.get("HOLD_S", "0.5"))
while time.monotonic() < end_s:
    sum(range(200_000))
