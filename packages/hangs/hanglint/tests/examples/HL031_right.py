import torch.distributed as dist


def share(tensor, mesh):
    group = mesh.get_group("tp")
    dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)
