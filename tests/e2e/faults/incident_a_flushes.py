"""Incident A: the replica's leader flushes once a bucket; the other ranks, which were not asked, flush only once."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
size = dist.get_world_size()
tp = max(2, size // 2)
mesh = init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("dp", "tp"))
replica, leader = mesh.get_group("tp"), mesh.get_local_rank("tp") == 0
partial_loading = leader  # the engine was asked by the leader only
for _ in range(3 if partial_loading else 1):
    handles = [None] * tp if leader else None
    dist.gather_object("handle", handles, dst=dist.get_global_rank(replica, 0), group=replica)  # waits
dist.barrier(replica)  # missing
