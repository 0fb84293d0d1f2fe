from threading import Thread

import torch.distributed as dist


def sum_metrics(metrics):
    dist.all_reduce(metrics)


def log(metrics):
    Thread(target=sum_metrics, args=(metrics,)).start()
