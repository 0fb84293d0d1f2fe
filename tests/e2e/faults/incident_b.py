"""Incident B: the MTP loss is reduced over DP and CP, under a guard that needs cp == 0."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
size = dist.get_world_size()
pp, dp, cp = {2: (1, 1, 2), 4: (1, 2, 2), 8: (2, 2, 2)}[size]
mesh = init_device_mesh("cpu", (pp, dp, cp), mesh_dim_names=("pp", "dp", "cp"))
context, dp_cp = mesh.get_group("cp"), mesh["dp", "cp"]._flatten("dp_cp").get_group()
is_last_stage = mesh.get_local_rank("pp") == pp - 1
for _step in range(2):
    keys = [torch.zeros(4) for _ in range(cp)]
    dist.all_gather(keys, torch.ones(4), group=context)  # missing
    if is_last_stage and mesh.get_local_rank("cp") == 0:
        mtp_loss = torch.ones(1)
        dist.all_reduce(mtp_loss, group=dp_cp)  # waits
dist.barrier()
