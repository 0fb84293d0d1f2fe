import torch.distributed as dist


def make_pairs(world_size):
    pair = None
    for first in range(0, world_size, 2):
        ranks = [first, first + 1]
        if dist.get_rank() in ranks:
            pair = dist.new_group(ranks)
    return pair
