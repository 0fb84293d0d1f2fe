import torch.distributed as dist


def main(train):
    dist.init_process_group("gloo")
    try:
        train()
    finally:
        dist.destroy_process_group()
