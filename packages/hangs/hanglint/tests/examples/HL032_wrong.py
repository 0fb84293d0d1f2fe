import torch.distributed as dist
from megatron.core import mpu


def mean_loss(loss):
    if mpu.is_pipeline_last_stage():
        dist.all_reduce(loss)
    return loss
