"""Rank 0 builds an extension with a compiler that runs in a process of its own; the others wait for the file."""

import os
import subprocess
import sys

import torch.distributed as dist

COMPILER = """
import sys, time
end_s = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end_s:
    sum(range(1000))
    time.sleep(0.01)
"""

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    subprocess.run([sys.executable, "-S", "-c", COMPILER, os.environ["PAUSE_S"]], check=True)
dist.barrier()
print(f"rank {rank}: done")
