import torch.distributed as dist


def mean_over_ranks(value):
    dist.all_reduce(value)
    return value / dist.get_world_size()


def write_metrics(writer, metrics):
    for name in ("loss", "accuracy"):
        mean = mean_over_ranks(metrics[name])
        if dist.get_rank() == 0:
            writer.write(name, mean)
