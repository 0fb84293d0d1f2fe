"""Runs a body on forked ranks that liveness watches, and says how each ended and what was told."""

import faulthandler
import multiprocessing
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offbeat_liveness as liveness
from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._dumps import read_verdicts

STALL_S = 1.0
LIMIT_S = 20.0
ABORTED = 4

Body = Callable[[int], None]


@dataclass
class Outcome:
    """What was left of a run."""

    exit_codes: list[int | None]
    outputs: list[str]
    verdicts: list[Verdict]
    directory: Path

    @property
    def only(self) -> Verdict:
        """The one verdict that was told; under load a straggler may come before a fatal one."""
        told = [each for each in self.verdicts if each.is_proof] or self.verdicts
        assert len(told) == 1, [each.headline for each in self.verdicts]
        return told[0]


def rank_main(body: Body, rank: int, size: int, port: Connection, directory: Path, settings: dict[str, Any]) -> None:
    """One rank: its output goes to a file, its world is a store in the parent, as with torchrun's agent."""
    with (directory / f"out-{rank}.txt").open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.setdefault("OFFBEAT_LIVENESS_GRACE_S", "0.5")
    os.environ["RES_OPTIONS"] = "attempts:0"  # torch's TCPStore looks up names of loopback peers: up to 5 s
    faulthandler.disable()  # pytest's own, which came with the fork
    liveness.watch(directory=directory / "dumps", **settings)
    store = dist.TCPStore("127.0.0.1", port.recv(), is_master=False, timeout=timedelta(seconds=LIMIT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S))
    for _ in range(2):
        dist.all_reduce(torch.ones(1))
    time.sleep(0.3)  # a run that has lasted a moment: the monitors have met
    body(rank)


def launch(
    body: Body,
    size: int,
    directory: Path,
    *,
    ends: Collection[int] | None = None,
    main: Callable[..., None] = rank_main,
    context: Any = None,
    **settings: Any,
) -> Outcome:
    """Run a body on forked ranks until `ends` (all) have ended or the limit is over, then kill what is left."""
    settings = {"stall_after_s": STALL_S, "policy": "strict", **settings}
    context = context or multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=main, args=(body, rank, size, pipes[rank][0], directory, settings), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    # Only now: a fork while its thread holds a lock would leave the child waiting for ever.
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _, sender in pipes:
        sender.send(server.port)
    awaited = processes if ends is None else [processes[rank] for rank in ends]
    end_s = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < end_s and any(is_running(process.pid) for process in awaited):
            time.sleep(0.02)
        for process in awaited:
            if not is_stopped(process.pid):
                process.join(1.0)  # its threads may take a moment longer than its state says
    finally:
        exit_codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
    outputs = [(directory / f"out-{rank}.txt").read_text(errors="replace") for rank in range(size)]
    dumps = directory / "dumps"
    return Outcome(exit_codes, outputs, read_verdicts(dumps) if dumps.exists() else [], directory)


def is_running(pid: int | None) -> bool:
    """Whether a child has neither ended nor been stopped."""
    return state_of(pid) not in ("Z", "X", "T", "")


def is_stopped(pid: int | None) -> bool:
    return state_of(pid) == "T"


def state_of(pid: int | None) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def step() -> None:
    dist.all_reduce(torch.ones(4))
