import torch.distributed as dist


def share(tensor, mesh):
    dist.broadcast(tensor, src=0, group=mesh.get_group("tp"))
