import torch.distributed as dist


def sum_metrics(metrics):
    dist.all_reduce(metrics)


def log(metrics):
    sum_metrics(metrics)
