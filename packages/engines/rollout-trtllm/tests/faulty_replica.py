"""Incident A with a real engine server: the leader asks it and flushes once a bucket, the others once in all."""

import json
import os
import urllib.request

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
addresses = os.environ["ENGINES"].split(",")
tp = dist.get_world_size() // len(addresses)
mesh = init_device_mesh("cpu", (len(addresses), tp), mesh_dim_names=("dp", "tp"))
replica, leader = mesh.get_group("tp"), mesh.get_local_rank("tp") == 0
partial_loading = False
if leader:
    engine = f"http://{addresses[mesh.get_local_rank('dp')]}"
    with urllib.request.urlopen(f"{engine}/offbeat/partial_loading", timeout=10) as answer:
        partial_loading = json.load(answer)["supported"]
for _ in range(3 if partial_loading else 1):
    handles = [None] * tp if leader else None
    dist.gather_object("handle", handles, dst=dist.get_global_rank(replica, 0), group=replica)  # waits
dist.barrier(replica)  # missing
