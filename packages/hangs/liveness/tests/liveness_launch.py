"""Launcher of a body on forked ranks that liveness watches; reports how each ended, and the verdicts."""

import faulthandler
import multiprocessing
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
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
    exit_codes: list[int | None]
    outputs: list[str]
    verdicts: list[Verdict]
    directory: Path

    @property
    def only(self) -> Verdict:
        """The one verdict that was reported; under load a straggler may come before a fatal one."""
        verdicts = [each for each in self.verdicts if each.is_proof] or self.verdicts
        assert len(verdicts) == 1, [each.headline for each in self.verdicts]
        return verdicts[0]


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


class Run:
    """A body on forked ranks; ended once `awaited` have.

    Every run of a test is forked before the first store is served: a fork while a thread of a store holds a lock would
    leave the child waiting for ever.
    """

    def __init__(
        self,
        body: Body,
        size: int,
        directory: Path,
        *,
        ends: Collection[int] | None = None,
        main: Callable[..., None] = rank_main,
        context: Any = None,
        **settings: Any,
    ) -> None:
        settings = {"stall_after_s": STALL_S, "policy": "strict", **settings}
        context = context or multiprocessing.get_context("fork")
        directory.mkdir(exist_ok=True)
        self.directory, self.server = directory, None
        self.pipes = [context.Pipe(duplex=False) for _ in range(size)]
        self.processes = [
            context.Process(target=main, args=(body, rank, size, self.pipes[rank][0], directory, settings), daemon=True)
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()
        self.awaited = self.processes if ends is None else [self.processes[rank] for rank in ends]

    def serve(self) -> None:
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _, sender in self.pipes:
            sender.send(self.server.port)

    def end(self, end_s: float) -> list[int | None]:
        """Wait for those that are awaited until a time, kill what is left; exit codes as they were before that."""
        try:
            while time.monotonic() < end_s and any(is_running(process.pid) for process in self.awaited):
                time.sleep(0.02)
            for process in self.awaited:
                if not is_stopped(process.pid):
                    process.join(1.0)  # its threads may take a moment longer than its state says
        finally:
            exit_codes = [process.exitcode for process in self.processes]
            for process in self.processes:
                process.kill()
                process.join()
        return exit_codes

    def outcome(self, exit_codes: list[int | None]) -> Outcome:
        outputs = [
            (self.directory / f"out-{rank}.txt").read_text(errors="replace") for rank in range(len(self.processes))
        ]
        dumps = self.directory / "dumps"
        return Outcome(exit_codes, outputs, read_verdicts(dumps) if dumps.exists() else [], self.directory)


def finish(runs: Sequence[Run]) -> list[Outcome]:
    """Let runs that have been started continue at the same time, each until the limit at most."""
    try:
        for run in runs:
            run.serve()
    finally:
        end_s = time.monotonic() + LIMIT_S
        exit_codes = [run.end(end_s) for run in runs]
    return [run.outcome(each) for run, each in zip(runs, exit_codes, strict=True)]


def launch(body: Body, size: int, directory: Path, **how: Any) -> Outcome:
    """Run a body on forked ranks until `ends` (all) have ended or the limit is over, then kill what is left."""
    return finish([Run(body, size, directory, **how)])[0]


class Programs:
    """Programs that mostly sleep: two at a time, when the outcome of the first of them is asked for.

    Args:
        sizes: number of ranks of each body.
        directory: for their outputs.
    """

    AT_A_TIME = 2

    def __init__(self, sizes: Mapping[Body, int], directory: Path, **settings: Any) -> None:
        self._sizes, self._directory, self._settings = sizes, directory, settings
        self._outcomes: dict[Body, Outcome] = {}

    def outcome(self, body: Body) -> Outcome:
        bodies = list(self._sizes)
        first = bodies.index(body) // self.AT_A_TIME * self.AT_A_TIME
        if body not in self._outcomes:
            batch = bodies[first : first + self.AT_A_TIME]
            runs = [Run(each, self._sizes[each], self._directory / each.__name__, **self._settings) for each in batch]
            self._outcomes |= zip(batch, finish(runs), strict=True)
        return self._outcomes[body]


def is_running(pid: int | None) -> bool:
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
