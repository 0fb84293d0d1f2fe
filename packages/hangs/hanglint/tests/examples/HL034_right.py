import torch.distributed as dist


def get_data_parallel_src_rank(group):
    return dist.get_process_group_ranks(group)[0]
