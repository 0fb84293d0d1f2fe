"""Rank 0 imports from a cold file system, ever new modules, before it comes to init_process_group."""

import importlib
import os
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

NUM_MODULES = 40

rank = int(os.environ["RANK"])
if rank == 0:
    with tempfile.TemporaryDirectory() as folder:
        rest_s = float(os.environ["PAUSE_S"]) / NUM_MODULES
        for number in range(NUM_MODULES):
            Path(folder, f"part_{number}.py").write_text("\n" * number + f"import time\ntime.sleep({rest_s})\n")
        sys.path.insert(0, folder)
        for number in range(NUM_MODULES):
            importlib.import_module(f"part_{number}")
dist.init_process_group("gloo")
dist.barrier()
print(f"rank {rank}: done")
