"""Healthy programs of random calls, whose ranks come late at random: the monitor has nothing to say of them.

From the environment: HEALTHY_SEED, HEALTHY_RUNS, HEALTHY_MAX_DELAY_S.
"""

import os
import random
import time

import torch
import torch.distributed as dist

import offbeat_liveness as liveness


def reduce_async() -> None:
    """Start an operation and wait for it later."""
    work = dist.all_reduce(torch.ones(8), async_op=True)
    time.sleep(0.01)
    work.wait()


def pass_around() -> None:
    """Send point to point, in the order that works: even ranks send first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    block = torch.ones(4)
    if rank % 2 == 0:
        dist.send(block, dst=(rank + 1) % size)
        dist.recv(block, src=(rank - 1) % size)
    else:
        dist.recv(block, src=(rank - 1) % size)
        dist.send(block, dst=(rank + 1) % size)


def reduce_in_halves() -> None:
    """Make groups and drop them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group(list(range(start, size, 2))) for start in (0, 1)]
    dist.all_reduce(torch.ones(4), group=halves[rank % 2])


def notify() -> None:
    """Send plain data from rank 0."""
    dist.broadcast_object_list([{"step": 1}], src=0)


def take_sample() -> None:
    """Declare a wait that ends."""
    with liveness.waiting("sample_queue.get", on=f"rank {dist.get_rank() ^ 1}", deadline_s=60):
        time.sleep(0.05)


CALLS = (reduce_async, pass_around, reduce_in_halves, notify, take_sample, dist.barrier)

dist.init_process_group("gloo")
seed, max_delay_s = int(os.environ["HEALTHY_SEED"]), float(os.environ["HEALTHY_MAX_DELAY_S"])
plan, own = random.Random(seed), random.Random(seed * 1000 + dist.get_rank())
for _ in range(int(os.environ["HEALTHY_RUNS"])):
    calls = plan.choices(CALLS, k=3)
    late_before = own.randrange(3)
    for number, call in enumerate(calls):
        if number == late_before:
            time.sleep(own.uniform(0, max_delay_s))
        call()
    dist.barrier()
