import torch.distributed as dist


def get_data_parallel_src_rank(num_groups):
    return dist.get_rank() % num_groups
