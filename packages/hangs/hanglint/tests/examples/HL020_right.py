import torch.distributed as dist


def generate(step, ids, num_steps):
    for _ in range(num_steps):
        ids = step(ids)
        dist.all_reduce(ids)
    return ids
