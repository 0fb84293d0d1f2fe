"""Rank 1 waits for samples of rank 0, which awaits its engines in asyncio and runs no line meanwhile."""

import asyncio
import os

import torch
import torch.distributed as dist

import offbeat_liveness as liveness


async def engine(number: int) -> float:
    """One answer."""
    await asyncio.sleep(float(os.environ["PAUSE_S"]))
    return float(number)


async def produce() -> list[float]:
    """All answers."""
    return await asyncio.gather(*[engine(number) for number in range(4)])


dist.init_process_group("gloo")
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    store.set("samples", str(asyncio.run(produce())))
elif rank == 1:
    with liveness.waiting("samples", on="rank 0", deadline_s=600):
        store.wait(["samples"])
dist.all_reduce(torch.ones(1))
print(f"rank {rank}: done")
