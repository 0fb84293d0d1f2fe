import torch.distributed as dist


def generate(step, ids):
    while not (ids[:, -1] == 0).all():
        ids = step(ids)
        dist.all_reduce(ids)
    return ids
