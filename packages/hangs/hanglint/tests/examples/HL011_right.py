import torch.distributed as dist


def save(path):
    is_taken = [path.exists() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(is_taken, src=0)
    if is_taken[0]:
        raise FileExistsError(path)
    dist.barrier()
