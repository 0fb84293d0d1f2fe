"""Bodies that real nccl groups run, and how they are started: never forked from a process that has seen a device."""

import multiprocessing
import os
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from liveness_launch import LIMIT_S, Body, Outcome, launch

import offbeat_liveness as liveness
from offbeat_liveness._process import flight_recorder, reading
from offbeat_liveness._process.nccl_recorder import NCCL
from offbeat_liveness._process.process_groups import group_snapshots
from offbeat_liveness._process.progress import ProgressTracker

SPIN_CYCLES = 20_000_000_000  # about 10 s on a device of 2 GHz


def device_main(body: Body, rank: int, size: int, port: Connection, directory: Path, settings: dict[str, Any]) -> None:
    """One rank, on the device of its number."""
    with (directory / f"out-{rank}.txt").open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["RES_OPTIONS"] = "attempts:0"
    liveness.watch(directory=directory / "dumps", **settings)
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port.recv(), is_master=False, timeout=timedelta(seconds=LIMIT_S))
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S))
    body(rank)


def launch_on_devices(body: Body, size: int, directory: Path, **settings: Any) -> Outcome:
    """As `launch`, with nccl."""
    return launch(body, size, directory, main=device_main, context=multiprocessing.get_context("spawn"), **settings)


def head_now(progress):
    return reading.read_snapshot(progress, name="", world="", rank=0, world_size=1, stall_after_s=1.0)


def read_all():
    progress = ProgressTracker(60.0)
    end_s = time.monotonic() + LIMIT_S
    while (entries := progress.recorder.entries()) is None:
        assert time.monotonic() < end_s
    return {head.backend: head for head in group_snapshots(entries)}


def pending_behind_a_spinning_kernel(rank):
    """The device has not begun the collective: it stands behind other work in its stream."""
    device = torch.device("cuda", rank)
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    dist.all_reduce(torch.ones(4, device=device))
    time.sleep(0.2)
    head = read_all()["nccl"]
    assert [(each.seq, each.op, each.done) for each in head.recent] == [
        (1, "all_reduce", True),
        (2, "all_reduce", False),
    ]
    assert (head.entered, head.timeout_s) == (2, LIMIT_S)
    assert flight_recorder.has_pending(flight_recorder.status_text())
    torch.cuda.synchronize()


def the_recorder_answers_while_the_main_thread_synchronizes(rank):
    """As a stuck process stands: in `synchronize`, for a device that does not come."""
    device = torch.device("cuda", rank)
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    dist.all_reduce(torch.ones(4, device=device))
    waiter = threading.Thread(target=torch.cuda.synchronize)
    waiter.start()
    progress, took_s = ProgressTracker(60.0), []
    for _ in range(10):
        start_s = time.monotonic()
        progress.look()
        head = head_now(progress)
        took_s.append(time.monotonic() - start_s)
        assert head.groups
    assert max(took_s) < 5.0, "the process hung with its recorder"
    assert waiter.is_alive(), "the device was done before it was asked"
    waiter.join(LIMIT_S)
    end_s = time.monotonic() + LIMIT_S
    while NCCL.asked_at_s is not None and time.monotonic() < end_s:
        head_now(progress)
    assert NCCL.asked_at_s is None


def transfers_to_itself_in_a_batch(rank):
    """nccl lets a rank send to itself within a batch; the first one connects, for which the host waits."""
    device = torch.device("cuda", rank)
    dist.all_reduce(torch.ones(1, device=device))
    one, other = torch.ones(4, device=device), torch.zeros(4, device=device)
    calls = [dist.P2POp(dist.isend, one, rank), dist.P2POp(dist.irecv, other, rank)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    works = dist.batch_isend_irecv(calls)
    time.sleep(0.2)
    head = read_all()["nccl"]
    assert [(each.op, each.peer, each.done) for each in head.transfers] == [
        ("send", rank, False),
        ("recv", rank, False),
    ]
    assert [(each.seq, each.done) for each in head.recent] == [(1, True)]
    for work in works:
        work.wait()
    torch.cuda.synchronize()
    time.sleep(0.5)  # the watchdog thread looks every 0.1 s
    assert read_all()["nccl"].transfers == ()


def rank_1_does_not_come(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(4, device="cuda:0"))
        torch.cuda.synchronize()
    time.sleep(LIMIT_S / 2)


def groups_in_another_order(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    device = torch.device("cuda", rank)
    for group in groups:
        dist.all_reduce(torch.ones(1, device=device), group=group)
    torch.cuda.synchronize()
    for group in groups if rank == 0 else groups[::-1]:
        dist.all_reduce(torch.ones(4, device=device), group=group)
        torch.cuda.synchronize()


def a_stage_without_its_neighbour(rank):
    device = torch.device("cuda", rank)
    if rank == 0:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(4, device=device), 1)]):
            work.wait()
        torch.cuda.synchronize()
    time.sleep(LIMIT_S / 2)
