import torch.distributed as dist


def save(model, path):
    if dist.get_rank() == 0:
        write(model, path)
    dist.barrier()


def write(model, path):
    path.write_bytes(bytes(model))
