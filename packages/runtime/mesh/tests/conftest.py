"""Ranks that may die: `run_ranks` forks them, and gives back how each one ended.

The `ranks` plugin runs tests whose ranks all pass; these tests are about ranks that do not.
"""

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP and FSDP import it: once here, not in every rank
import torch.distributed.fsdp
from torch._C._distributed_c10d import Store, TCPStore

import offbeat_liveness  # noqa: F401 - warm before the forks
from offbeat_mesh import Group, Mesh, join_world
from offbeat_testing import wait_for_leaving_threads

sys.path.insert(0, str(Path(__file__).parent))  # for mesh_hosts

PR_SET_PDEATHSIG = 1
LIMIT_S = 60.0
JOINED_S = 50.0  # so that no deadline of a call can be what ended it


@dataclass
class Ended:
    """How one rank ended.

    Args:
        signal: that killed it; 0 if none.
        value: what the body returned.
        error: name of the error's type, "" if none.
        text: of the error.
    """

    signal: int = 0
    value: Any = None
    error: str = ""
    text: str = ""


@dataclass
class RankTeam:
    pids: dict[int, int] = field(default_factory=dict)

    def run(self, num_ranks: int, body: Callable[[int, int, Store], Any]) -> list[Ended]:
        """Run `body(rank, size, store)` in `num_ranks` processes that share a store held by this one."""
        readers, port_writers = {}, []
        wait_for_leaving_threads()
        for rank in range(num_ranks):
            reader, writer = os.pipe()
            port_reader, port_writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                _run_rank(rank, num_ranks, port_reader, body, writer)
            os.close(writer)
            os.close(port_reader)
            port_writers.append(port_writer)
            self.pids[rank], readers[rank] = pid, reader
        # Opened after the forks: a child forked beside the server's thread may inherit a lock that is never released.
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))
        for port_writer in port_writers:
            os.write(port_writer, f"{server.port}\n".encode())
            os.close(port_writer)
        end = time.monotonic() + LIMIT_S
        return [self._reap(rank, readers[rank], end) for rank in range(num_ranks)]

    def _reap(self, rank: int, reader: int, end: float) -> Ended:
        while True:
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                break
            if time.monotonic() > end:
                self.kill()
                pytest.fail(f"rank {rank} did not end within {LIMIT_S:g} s")
            time.sleep(0.005)
        del self.pids[rank]
        with os.fdopen(reader, "rb") as pipe:
            said = pipe.read()
        ended = Ended(**json.loads(said)) if said else Ended()
        ended.signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return ended

    def kill(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.pids.clear()


def _run_rank(rank: int, size: int, port_reader: int, body: Callable[[int, int, Store], Any], writer: int) -> None:
    code = 0
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        faulthandler.disable()  # some ranks are meant to crash
        torch.set_num_threads(1)
        port = int(os.read(port_reader, 16))
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT_S))
        try:
            said: dict[str, Any] = {"value": body(rank, size, store)}
        except Exception as error:  # noqa: BLE001 - reported to the test
            said = {"error": type(error).__name__, "text": str(error)}
            if os.environ.get("SHOW_RANKS"):
                traceback.print_exc()
        os.write(writer, json.dumps(said).encode())
    except BaseException:  # noqa: BLE001 - the child's last word
        traceback.print_exc()
        code = 1
    finally:
        os._exit(code)


@pytest.fixture
def run_ranks() -> Iterator[Callable[[int, Callable[[int, int, Store], Any]], list[Ended]]]:
    """Run a body on several ranks: `run_ranks(2, body)`, with `body(rank, size, store)`; [num_ranks] endings."""
    team = RankTeam()
    yield team.run
    team.kill()


@pytest.fixture
def run_group(
    run_ranks: Callable[[int, Callable[[int, int, Store], Any]], list[Ended]],
) -> Callable[[int, Callable[[int, Group, Store], Any]], list[Ended]]:
    """Do `run_ranks` over one group of all ranks of a world: `run_group(2, body)`, with `body(rank, group, store)`."""

    def run(num_ranks: int, body: Callable[[int, Group, Store], Any]) -> list[Ended]:
        def join(rank: int, size: int, store: Store) -> Any:
            with join_world(rank=rank, size=size, store=store, device="cpu", deadline_s=JOINED_S):
                return body(rank, Mesh(dp=size).group("dp"), store)

        return run_ranks(num_ranks, join)

    return run
