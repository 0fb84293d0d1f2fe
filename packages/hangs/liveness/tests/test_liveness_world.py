"""How ranks find each other in the store: across restarts, before they enter, and where there is no store."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from offbeat_liveness._network.job_store import Keys, World
from offbeat_liveness._network.side_channel import Address

LIMIT_S = 60
STEP_S = timedelta(seconds=20)
RANK = """
import os, sys, time
import torch, torch.distributed as dist
import offbeat_liveness as liveness

monitor = liveness.watch(stall_after_s=2)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
end_s = time.monotonic() + 30
def ranks():
    return sorted(each.rank for each in monitor._peers.others().values() if each.rank is not None)
others = [each for each in range(size) if each != rank]
while (ranks() != others or not monitor._peers.joined._is_confirmed) and time.monotonic() < end_s:
    time.sleep(0.02)
worlds = sorted({each.world for each in monitor._peers.others().values()})
print(rank, ranks(), monitor._peers.world, worlds, flush=True)
sys.stdin.readline()
os._exit(0)
"""


@contextlib.contextmanager
def ranks_of(code: str, *environments: dict[str, str]) -> Iterator[list["subprocess.Popen[str]"]]:
    with contextlib.ExitStack() as stack:
        processes = []
        for each in environments:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                env={**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "attempts:0", **each},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def a_worker(port: int, rank: int, *, restarts: int, size: int = 2) -> dict[str, str]:
    """The environment that an agent of torchrun gives to a worker, whose store is the agents' own."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": "1",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=STEP_S)


@pytest.mark.timeout(LIMIT_S)
def test_workers_of_agents_that_have_counted_different_restarts_find_each_other(server: dist.TCPStore) -> None:
    """An agent counts the failures of its own workers alone."""
    with ranks_of(RANK, a_worker(server.port, 0, restarts=0), a_worker(server.port, 1, restarts=1)) as workers:
        first, second = (line_of(each).split(maxsplit=3) for each in workers)
    assert (first[:2], second[:2]) == (["0", "[1]"], ["1", "[0]"])
    assert first[2] == second[2]
    assert first[3] == second[3] == f"['{first[2]}']"


@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S)
def test_after_a_restart_on_the_same_store_no_rank_meets_the_dead(server: dist.TCPStore) -> None:
    """torchrun's agents keep their store, and with it what the workers before have written."""
    worlds = []
    for restarts in (0, 1):
        for key in [each for each in server.list_keys() if "gloo" in each or "cpu" in each]:
            server.delete_key(key)  # torch's own, which the second world could take for its own as well
        environments = [a_worker(server.port, rank, restarts=restarts) for rank in range(2)]
        with ranks_of(RANK, *environments) as workers:
            said = [line_of(each).split(maxsplit=3) for each in workers]
        assert [each[1] for each in said] == ["[1]", "[0]"]
        assert said[0][2] == said[1][2]
        worlds.append(said[0][2])
    assert worlds[0] != worlds[1]


def an_address(rank: int, world: str) -> Address:
    return Address(
        host="127.0.0.1", port=1, machine="vm", pid=rank, born=0, name=f"rank {rank}", rank=rank, world=world
    )


def worlds_of(store: Any, size: int) -> list[World]:
    return [World(store, rank, size, "s", is_formed=True) for rank in range(size)]


def test_what_an_earlier_world_has_written_is_not_of_now() -> None:
    store = dist.HashStore()
    for _ in range(2):
        zero, one = worlds_of(store, 2)
        one.take_token()
        assert zero.name == one.name
        one.write(an_address(1, one.name))
        (found,) = zero.read({1}, now=True)
        assert zero.is_of_now(found)
    stale = World(store, 0, 2, "s", is_formed=True)
    (found,) = stale.read({1}, now=True)
    assert not stale.is_of_now(found)


def test_a_rank_that_took_an_old_token_takes_the_new_one_when_it_looks_again() -> None:
    store = dist.HashStore()
    old = World(store, 0, 2, "s", is_formed=True)
    late = World(store, 1, 2, "s", is_formed=True)
    late.take_token()
    assert late.name == old.name
    assert late.is_unsettled, "until rank 0 itself has said so"
    new = World(store, 0, 2, "s", is_formed=True)
    assert late.take_token()
    late.confirm(old.name)
    assert late.is_unsettled
    late.confirm(new.name)
    late.missing.clear()
    assert not late.is_unsettled


def test_a_rank_that_waits_to_enter_takes_no_token_of_an_earlier_world() -> None:
    store = dist.HashStore()
    World(store, 0, 2, "s", is_formed=True)
    early = World(store, 1, 2, "s", is_formed=False)
    assert not early.take_token()


class CountingStore:
    """Counts requests on their way to a store."""

    def __init__(self, store: Any) -> None:
        self._store, self.num_requests = store, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            self.num_requests += 1
            return method(*args)

        return call


def test_while_a_rank_is_still_to_come_a_look_is_one_request_whatever_the_number_of_ranks() -> None:
    size = 200
    store = CountingStore(dist.HashStore())
    zero = World(store, 0, size, "s", is_formed=True)
    zero.write(an_address(0, zero.name))
    zero.read(zero.missing, now=False)  # the first look may be a slow one
    for rank in range(1, size - 1):
        member = World(store, rank, size, "s", is_formed=True)
        member.take_token()
        member.write(an_address(rank, member.name))
    before = store.num_requests
    assert zero.read(zero.missing, now=False) == []
    assert store.num_requests - before == 1
    last = World(store, size - 1, size, "s", is_formed=True)
    last.take_token()
    last.write(an_address(size - 1, last.name))
    before = store.num_requests
    assert len(zero.read(zero.missing, now=False)) == size - 1
    assert store.num_requests - before <= 2 + size


def test_looks_become_rarer_while_a_rank_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat_liveness._network.job_store.HASTE_S", 0.0)
    world = World(dist.HashStore(), 0, 2, "s", is_formed=True)
    pauses = []
    for _ in range(8):
        world.read(world.missing, now=False)
        pauses.append(world._next_s - time.monotonic())
    assert pauses[0] < 0.06
    assert 1.5 < pauses[-1] <= 2.0
    assert not world.is_in_haste
    assert world.is_unsettled


def test_all_keys_that_are_there_are_read() -> None:
    keys = Keys(dist.HashStore(), "p")
    keys.set("a/0", "zero")
    assert keys.get_all({0: "a/0", 1: "a/1"}) == {0: "zero"}
    assert keys.get_all({1: "a/1"}) == {}
    assert keys.get("a/1") == ""


NO_STORE = """
import os, sys, time, threading
import torch.distributed as dist
import offbeat_liveness as liveness

monitor = liveness.watch(stall_after_s=1)

def show():
    end_s = time.monotonic() + 20
    while not monitor.head().notes and time.monotonic() < end_s:
        time.sleep(0.05)
    print(*monitor.head().notes, flush=True)
    os._exit(0)

threading.Thread(target=show, daemon=True).start()
def init_process_group(rank, world_size):  # stands for torch's own, whose trace on stderr is its own
    time.sleep(60)
code = init_process_group.__code__
init_process_group.__code__ = code.replace(co_filename="/x/torch/distributed/distributed_c10d.py")
init_process_group(1, 2)
"""


@pytest.mark.timeout(LIMIT_S)
def test_a_store_that_is_gone_is_named_and_nothing_of_ours_is_on_stderr(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with ranks_of(NO_STORE, a_worker(port, 1, restarts=0)) as (rank,):
        said = line_of(rank)
        _, errors = rank.communicate(timeout=LIMIT_S)
    assert f"no process answers at 127.0.0.1:{port}" in said
    assert "socket.cpp" not in errors
    assert "TCPStore" not in errors


SLOW = """
import torch.distributed
import time
time.sleep(60)
"""
FIRST = """
import os, sys, time
import torch.distributed as dist
import offbeat_liveness as liveness
monitor = liveness.current_monitor()
end_s = time.monotonic() + 30
while [each.rank for each in monitor._peers.others().values()] != [1] and time.monotonic() < end_s:
    time.sleep(0.05)
print([each.name for each in monitor._peers.others().values()], sorted(monitor._peers.unknown_ranks()), flush=True)
os._exit(0)
"""


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("in_a_folder", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_wrapped_rank_is_known_long_before_it_enters_the_world(
    server: dist.TCPStore, tmp_path: Path, in_a_folder: bool
) -> None:
    """Through the store once torch is imported; through the folder before."""
    for name, code in (("slow", "import time; time.sleep(60)" if in_a_folder else SLOW), ("first", FIRST)):
        (tmp_path / f"{name}.py").write_text(code)
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, name in enumerate(("first", "slow")):
            folder = {"OFFBEAT_LIVENESS_DIR": str(tmp_path / "dumps")} if in_a_folder else {}
            process = subprocess.Popen(
                [sys.executable, "-m", "offbeat_liveness", "run", str(tmp_path / f"{name}.py")],
                env={**os.environ, "OFFBEAT_STALL_AFTER_S": "60", **a_worker(server.port, rank, restarts=0), **folder},
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            processes.append(process)
        assert line_of(processes[0]) == "['rank 1'] []"


FIRST_CALLS = """
import threading, time
import offbeat_liveness as liveness
monitor = liveness.watch(stall_after_s=600)
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
threading.Thread(target=dist.HashStore().get, args=("command/1",), daemon=True).start()
time.sleep(0.5)
print([(wait.what, wait.on) for wait in monitor.head().waits])
"""


def test_the_first_wait_of_a_world_is_reported_with_its_key_however_soon_it_comes() -> None:
    """The next look of the monitor, up to half a second later, would find a call that has begun unseen."""
    ran = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.strip() == "[('store.get', 'command/1')]"


ENTERS = """
import sys, threading, time
import offbeat_liveness as liveness
from offbeat_liveness._settings import read_settings
from offbeat_liveness._watch import watch_when_needed

if sys.argv[1] == "at once":
    liveness.watch(stall_after_s=600)
else:
    watch_when_needed(read_settings(600, "report", None, ""))
import torch.distributed as dist
enter = lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2)
threading.Thread(target=enter, daemon=True).start()
time.sleep(1)
print([wait.what for wait in liveness.current_monitor().head().waits])
"""


@pytest.mark.parametrize("begins", ["at once", "when needed"])
def test_a_call_that_makes_a_group_is_reported_as_the_program_made_it(begins: str) -> None:
    """It goes through a function of torch's that is replaced, and ranks are compared by the outer one."""
    ran = subprocess.run(
        [sys.executable, "-c", ENTERS, begins], capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout.strip() == "['init_process_group']"
