import os
from datetime import timedelta

import torch
import torch.distributed as dist


def start():
    rank = int(os.environ["LOCAL_RANK"])
    size = torch.cuda.device_count()
    dist.init_process_group("nccl", rank=rank, world_size=size, timeout=timedelta(minutes=5))
