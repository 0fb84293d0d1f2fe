import torch.distributed as dist


def finish_checkpoint(future, is_due):
    if is_due:
        future.result(timeout=600)
        dist.barrier()
