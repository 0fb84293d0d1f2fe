"""Incident A, the first mend: the leader's answer is broadcast from rank 0, which replica 1 does not hold."""

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
for _ in range(5):  # a few healthy steps
    dist.all_reduce(torch.ones(1))
    time.sleep(0.2)
size = dist.get_world_size()
mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
answer = [True] if mesh.get_local_rank("tp") == 0 else [None]
dist.broadcast_object_list(answer, src=0, group=mesh.get_group("tp"))  # missing: torch refuses it on replica 1
dist.barrier()  # waits
