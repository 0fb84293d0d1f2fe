"""Ranks of a group, forked from the test's process: some of them die in a test, so the `ranks` plugin does not fit."""

import ctypes
import faulthandler
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

import pytest
import torch
from torch._C._distributed_c10d import FileStore

import offbeat_liveness  # noqa: F401 - warm before the forks
from offbeat_mesh import Group, Mesh, join_world
from offbeat_testing import wait_for_leaving_threads

PR_SET_PDEATHSIG = 1
LIMIT_S = 60.0

RunRanks = Callable[[int, Callable[[Group], str]], list[str]]


class RankTeam:
    """Forks and reaps."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.folders: list[str] = []

    def run(self, num_ranks: int, body: Callable[[Group], str]) -> list[str]:
        """Run `body(group)` on ranks of one group.

        Returns:
            For each rank what the body returned, or "ErrorType: text", or "" if it was killed.
        """
        folder = tempfile.mkdtemp(prefix="offbeat-ranks-")
        self.folders.append(folder)
        readers = []
        wait_for_leaving_threads()
        for rank in range(num_ranks):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                _be_rank(rank, num_ranks, f"{folder}/store", body, writer)
            os.close(writer)
            self.pids.append(pid)
            readers.append(reader)
        end = time.monotonic() + LIMIT_S
        return [self._reap(rank, reader, end) for rank, reader in enumerate(readers)]

    def _reap(self, rank: int, reader: int, end: float) -> str:
        while not os.waitpid(self.pids[rank], os.WNOHANG)[0]:
            if time.monotonic() > end:
                self.kill()
                pytest.fail(f"rank {rank} did not end within {LIMIT_S:g} s")
            time.sleep(0.005)
        self.pids[rank] = 0
        with os.fdopen(reader) as pipe:
            return pipe.read()

    def kill(self) -> None:
        """Leave no rank behind."""
        for pid in filter(None, self.pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.pids.clear()
        for folder in self.folders:
            shutil.rmtree(folder)
        self.folders.clear()


def _be_rank(rank: int, size: int, path: str, body: Callable[[Group], str], writer: int) -> None:
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        torch.set_num_threads(1)
        faulthandler.dump_traceback_later(LIMIT_S - 5)  # where it stands, for the report of a test that hangs
        store = FileStore(path, size)  # a TCPStore looks names up, which takes seconds where the DNS is slow
        with join_world(rank=rank, size=size, store=store, device="cpu", deadline_s=30):
            group = Mesh(dp=size).group("dp", channel="weights")
            try:
                said = body(group)
            except Exception as error:  # noqa: BLE001 - told to the test
                said = f"{type(error).__name__}: {error}"
            os.write(writer, said.encode())
            os.close(writer)
    except BaseException:  # noqa: BLE001 - the child's last word
        if os.environ.get("SHOW_RANKS"):
            traceback.print_exc()
    finally:
        os._exit(0)
