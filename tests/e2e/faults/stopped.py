"""A user stops a rank, and forgets it."""

import os
import signal
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(5):  # a few healthy steps
    dist.all_reduce(torch.ones(1))
    time.sleep(0.2)
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)  # missing
dist.all_reduce(torch.ones(1))  # waits
