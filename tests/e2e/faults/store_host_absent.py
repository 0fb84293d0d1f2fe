"""The address of rank 0 is wrong: no process listens at that port."""

import os
import socket

import torch.distributed as dist

with socket.socket() as unused:
    unused.bind(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(unused.getsockname()[1])
dist.init_process_group("gloo")  # waits
