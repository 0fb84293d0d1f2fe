import torch.distributed as dist


def log_loss(loss):
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(loss.item())
