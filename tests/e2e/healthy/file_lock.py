"""All ranks build one cache under a file lock; a process of another job holds it for a while."""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

HOLDER = """
import fcntl, sys, time
with open(sys.argv[1], "a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.lock"
        command = [sys.executable, "-S", "-c", HOLDER, str(path), os.environ["PAUSE_S"]]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
            holder.stdout.readline()
            with path.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
dist.barrier()
print(f"rank {rank}: done")
