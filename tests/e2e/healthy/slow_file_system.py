"""Rank 0 writes a checkpoint to a very slow file system, simulated by a pipe with a slow reader."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

READER = """
import sys, time
with open(sys.argv[1], "rb", buffering=0) as pipe:
    while pipe.read(1 << 16):
        time.sleep(float(sys.argv[2]))
"""
NUM_PIECES = 3

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step-100.pt"
        os.mkfifo(path)
        rest_s = float(os.environ["PAUSE_S"]) / NUM_PIECES
        reader = subprocess.Popen([sys.executable, "-S", "-c", READER, str(path), str(rest_s)])
        with path.open("wb", buffering=0) as file:
            for _ in range(NUM_PIECES + 1):
                file.write(bytes(1 << 16))
        assert reader.wait() == 0
dist.barrier()
print(f"rank {rank}: done")
