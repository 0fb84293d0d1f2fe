import torch.distributed as dist


def mean_over_ranks(value):
    dist.all_reduce(value)
    return value / dist.get_world_size()


def write_metrics(writer, metrics):
    if dist.get_rank() == 0:
        for name in ("loss", "accuracy"):
            writer.write(name, mean_over_ranks(metrics[name]))
