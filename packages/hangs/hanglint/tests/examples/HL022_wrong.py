import torch.distributed as dist


def share(tensors, wanted):
    for name in set(wanted):
        dist.broadcast(tensors[name], src=0)
