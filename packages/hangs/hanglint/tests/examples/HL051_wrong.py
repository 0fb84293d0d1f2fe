import torch.distributed as dist


def start():
    dist.init_process_group("nccl")
