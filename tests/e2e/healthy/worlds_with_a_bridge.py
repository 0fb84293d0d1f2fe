"""A trainer's and an engine's world, and a group across them: ranks count in each world from 0. The engine is busy."""

import os
import time

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

global_rank, half = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // 2
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
is_engine, rank = global_rank >= half, global_rank % half
world = "engine" if is_engine else "trainer"
store = dist.PrefixStore(world, dist.TCPStore(*address, is_master=False))
dist.init_process_group("gloo", store=store, rank=rank, world_size=half)

# As RL frameworks make the group for weights: trainer rank 0 and all engines, over a store of its own.
place = 1 + rank if is_engine else 0
bridge = None
if is_engine or rank == 0:
    size = 1 + half
    bridge_store = dist.PrefixStore("weights", dist.TCPStore(*address, is_master=False))
    bridge, _ = c10d._new_process_group_helper(
        size, place, [], c10d.Backend("gloo"), bridge_store, group_name="weights", timeout=c10d.default_pg_timeout
    )
    c10d._world.pg_group_ranks[bridge] = {each: each for each in range(size)}

dist.barrier()
if is_engine and rank == 0:
    time.sleep(float(os.environ["PAUSE_S"]))  # it generates; the weights can wait
weights = torch.ones(4)
if bridge is not None:
    dist.broadcast(weights, src=0, group=bridge)
dist.barrier()
print(f"rank {global_rank}: done")
