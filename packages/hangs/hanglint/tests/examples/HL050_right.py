import os
from datetime import timedelta

import torch.distributed as dist


def start():
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl", rank=rank, world_size=size, timeout=timedelta(minutes=5))
