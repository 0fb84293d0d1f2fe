import torch.distributed as dist


def make_pairs(world_size):
    pair = None
    for first in range(0, world_size, 2):
        ranks = [first, first + 1]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            pair = group
    return pair
