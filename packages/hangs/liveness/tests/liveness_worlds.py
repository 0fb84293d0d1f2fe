"""Two worlds of real processes with one group across both, as frameworks join a trainer and its engines."""

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

LIMIT_S = 30.0
ACROSS = "weight_sync"


def notify(rank: int, world: int, ports: list[int], body: Callable[[Any], Any], port: Any) -> None:
    """One process: rank `rank` of a world of two; together the ranks of both worlds are 0, 1 and 2, 3."""
    os.environ["RES_OPTIONS"] = "attempts:0"
    own = dist.TCPStore("127.0.0.1", ports[world], is_master=False, timeout=timedelta(seconds=LIMIT_S))
    dist.init_process_group("gloo", store=own, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_S))
    port.send(body(join_across(rank, world, ports[2])))
    dist.barrier()


def join_across(rank: int, world: int, port: int) -> Any:
    """A group of all four, made as OpenRLHF, verl and vLLM make it: {0: 0, 1: 1, ...}, whatever a rank is at home."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT_S))
    group, _ = c10d._new_process_group_helper(
        4, 2 * world + rank, [], "gloo", dist.PrefixStore(ACROSS, store), group_name=ACROSS,
        timeout=timedelta(seconds=77),
    )  # fmt: skip
    c10d._world.pg_group_ranks[group] = {each: each for each in range(4)}
    return group


def run_two_worlds(body: Callable[[Any], Any]) -> list[Any]:
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(4)]
    starts = [context.Pipe(duplex=False) for _ in range(4)]
    processes = [
        context.Process(target=_wait_and_notify, args=(each % 2, each // 2, starts[each][0], body, pipes[each][1]))
        for each in range(4)
    ]
    for process in processes:
        process.start()
    # Only now: a fork while its thread holds a lock would leave the child waiting for ever.
    servers = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(3)]
    try:
        for _, sender in starts:
            sender.send([server.port for server in servers])
        end_s = time.monotonic() + LIMIT_S
        answers = []
        for receiver, _ in pipes:
            assert receiver.poll(max(0.0, end_s - time.monotonic())), "a process did not answer"
            answers.append(receiver.recv())
        return answers
    finally:
        for process in processes:
            process.join(1.0)
            process.kill()
            process.join()


def _wait_and_notify(rank: int, world: int, start: Any, body: Callable[[Any], Any], port: Any) -> None:
    notify(rank, world, start.recv(), body, port)


def use(group: Any) -> None:
    dist.all_reduce(torch.ones(1), group=group)
