from datetime import timedelta

import torch.distributed as dist


def main(train):
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    train()
    dist.destroy_process_group()
