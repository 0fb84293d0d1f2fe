import torch.distributed as dist


def save(path):
    if dist.get_rank() == 0 and path.exists():
        raise FileExistsError(path)
    dist.barrier()
