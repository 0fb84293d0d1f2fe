"""Joining and leaving the world: missing ranks, ranks that are there twice, and process groups of other code."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from offbeat_core import ConfigError, DeadlineError
from offbeat_device import open_device
from offbeat_mesh import Mesh, _world, current_world, join_world, open_store


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_a_world_of_one_needs_no_other_process(run_ranks):
    def body(rank, num_ranks, store):
        with join_world(device="cpu") as world:
            mesh = Mesh()
            assert (world.rank, world.size, current_world()) == (0, 1, world)
            assert mesh.device_mesh.mesh_dim_names == ("pp", "dp", "cp", "tp")
            assert mesh.group("dp").device_mesh.size() == 1
            assert dist.get_world_size() == 1
        assert current_world() is None
        return dist.is_initialized()

    assert run_ranks(1, body)[0].value is False


def test_an_address_is_opened_by_rank_0(run_ranks):
    port = free_port()

    def body(rank, num_ranks, store):
        address = f"127.0.0.1:{port}"
        with join_world(rank=rank, size=num_ranks, address=address, device="cpu", deadline_s=30) as world:
            return int(Mesh(dp=world.size).group("dp").all_reduce(torch.ones(1)))

    assert [one.value for one in run_ranks(3, body)] == [3, 3, 3]


def test_a_world_can_be_joined_again_after_it_was_left(run_ranks):
    def body(rank, num_ranks, store):
        totals = []
        for turn in range(3):
            turn_store = dist.PrefixStore(str(turn), store)
            with join_world(rank=rank, size=num_ranks, store=turn_store, device="cpu", deadline_s=30):
                totals.append(int(Mesh(tp=num_ranks).group("tp").all_reduce(torch.ones(1))))
        return totals

    assert [one.value for one in run_ranks(2, body)] == [[2, 2, 2]] * 2


def test_ranks_that_do_not_come_are_named(run_ranks):
    def body(rank, num_ranks, store):
        if rank in (0, 2):
            join_world(rank=rank, size=num_ranks, store=store, device="cpu", deadline_s=1.5)

    ended = run_ranks(4, body)
    for rank in (0, 2):
        assert ended[rank].error == "DeadlineError"
        assert "join_world: waited 1.5 s for rank 1, 3 of 4, which did not come" in ended[rank].text


def test_no_process_at_the_address_is_reported(run_ranks):
    port = free_port()

    def body(rank, num_ranks, store):
        join_world(rank=1, size=2, address=f"127.0.0.1:{port}", device="cpu", deadline_s=1.0)

    ended = run_ranks(1, body)[0]
    assert ended.error == "DeadlineError"
    assert f"waited 1 s for rank 0 at 127.0.0.1:{port}, which did not come; has it started?" in ended.text


def test_an_address_in_use_is_said(run_ranks):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        def body(rank, num_ranks, store):
            join_world(rank=0, size=2, address=address, device="cpu", deadline_s=2.0)

        ended = run_ranks(1, body)[0]
    assert ended.error == "ConfigError"
    assert f"rank 0 cannot open {address}" in ended.text


def test_a_rank_that_comes_twice_is_refused(run_ranks):
    def body(rank, num_ranks, store):
        if rank == 0:
            with contextlib.suppress(DeadlineError):
                join_world(rank=0, size=2, store=store, device="cpu", deadline_s=1.0)
            return ""
        store.wait(["offbeat/world/1/joined/0"])
        with pytest.raises(ConfigError) as caught:
            join_world(rank=0, size=2, store=store, device="cpu")
        return str(caught.value)

    assert "two processes joined as rank 0 of 2" in run_ranks(2, body)[1].value


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rank": 0}, "needs rank, size, and one of address and store"),
        ({"rank": 0, "size": 2}, "address=None, store=None"),
        ({"address": "127.0.0.1:1"}, "rank=None"),
        ({"rank": 2, "size": 2, "address": "127.0.0.1:1"}, "0 to size - 1: got rank 2 of 2"),
        ({"rank": 0, "size": 2, "address": "localhost"}, re.escape('must read "host:port"')),
    ],
)
def test_arguments_that_do_not_belong_together_are_refused(arguments, text):
    with pytest.raises(ConfigError, match=text):
        join_world(device="cpu", **arguments)
    assert current_world() is None


@pytest.mark.ranks(2)
def test_the_store_of_an_adopted_group_keeps_its_timeout():
    store = dist.distributed_c10d._get_default_store()
    before = store.timeout
    Mesh(dp=2, deadline_s=7)
    assert store.timeout == before


@contextlib.contextmanager
def killable_store():
    """A store that a process of its own holds: its port, and that process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        held = open_store("127.0.0.1")
        os.write(writer, str(held.port).encode())
        signal.pause()
    try:
        yield int(os.read(reader, 16)), pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("step", ["_meet", pytest.param("find_host", marks=pytest.mark.nightly)])
def test_a_store_that_is_lost_while_joining_is_said(run_ranks, step):
    """It is gone after that step."""

    def body(rank, num_ranks, store):
        whole = getattr(_world, step)
        with killable_store() as (port, holder):

            def lose(*arguments):
                found = whole(*arguments)
                os.kill(holder, signal.SIGKILL)
                os.waitid(os.P_PID, holder, os.WEXITED | os.WNOWAIT)
                return found

            setattr(_world, step, lose)
            theirs = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
            try:
                join_world(rank=0, size=1, store=theirs, device="cpu", deadline_s=2)
            finally:
                assert current_world() is None
                assert not dist.is_initialized()

    ended = run_ranks(1, body)[0]
    assert ended.error == "DeadlineError"
    assert "waited 2 s for the store, which did not come; it was lost while all were joining" in ended.text


@pytest.mark.nightly
def test_a_rank_0_that_is_lost_while_joining_is_named_and_leaves_no_world_behind(run_ranks):
    def body(rank, num_ranks, store):
        if rank == 0:  # comes, and is gone before it has opened its control server
            store.set("offbeat/world/1/host/0", "127.0.0.1")
            store.add("offbeat/world/1/joined/0", 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=20))
            store.get("over")
            return None
        try:
            with pytest.raises(DeadlineError, match="rank 0's control server"):
                join_world(rank=1, size=2, store=store, device="cpu", deadline_s=3)
            return [current_world() is None, dist.is_initialized()]
        finally:
            store.set("over", "1")

    ended = run_ranks(2, body)
    assert ended[1].value == [True, False], ended[1].text


@pytest.mark.ranks(2)
def test_leaving_a_world_over_an_adopted_group_keeps_the_group(rank):
    with pytest.raises(ConfigError, match="without rank, size, address and store"):
        join_world(rank=0, size=2, device="cpu")
    with join_world(device="cpu") as world:
        assert (world.rank, world.size) == (rank, 2)
        with pytest.raises(ConfigError, match=f"rank {rank} of a world already"):
            join_world(device="cpu")
        assert Mesh(dp=2).group("dp").all_gather_data(rank) == [0, 1]
    assert dist.is_initialized()
    with join_world(device="cpu"):
        assert Mesh(tp=2).group("tp").all_gather_data(rank) == [0, 1]


@pytest.mark.ranks(2)
def test_a_mesh_joins_the_world_itself(rank):
    mesh = Mesh(dp=2)
    assert current_world() is not None
    assert (mesh.rank, mesh.size, mesh.coordinates["dp"]) == (rank, 2, rank)


SCRIPT = """
import sys
from pathlib import Path

import torch
from offbeat_mesh import Mesh, join_world

with join_world(device="cpu", deadline_s=40) as world:
    total = Mesh(dp=world.size).group("dp").all_reduce(torch.ones(1) * (world.rank + 1))
    Path(sys.argv[1], f"rank {world.rank} of {world.size}").write_text(str(int(total)))
"""


def test_torchrun_says_who_is_who(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    line = [*command, str(script), str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    said = {path.name: path.read_text() for path in tmp_path.glob("rank*")}
    assert said == {"rank 0 of 2": "3", "rank 1 of 2": "3"}


@pytest.mark.parametrize(
    ("device", "expected"),
    [("abacus", "abacus:1"), ("auto", "abacus:1"), ("cpu", "cpu"), ("abacus:0", "abacus:0")],
)
def test_a_kind_alone_takes_the_device_of_its_local_rank(monkeypatch, device, expected):
    """torchrun starts all ranks of a host alike; without a number all of them would compute on the first device."""
    monkeypatch.setattr("offbeat_mesh._world.available_devices", lambda: {"abacus": 2, "cpu": 1})
    monkeypatch.setattr("offbeat_mesh._world.open_device", opened := Mock(return_value=open_device("cpu")))
    monkeypatch.setenv("LOCAL_RANK", "1")
    join_world(device=device).leave()
    opened.assert_called_once_with(expected)


def test_importing_the_package_does_not_import_torch():
    code = "import offbeat_mesh, sys; dir(offbeat_mesh); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_store_is_open_at_its_own_address_alone():
    store = open_store("127.0.0.1", deadline_s=20.0)
    other = TCPStore("127.0.0.1", store.port, is_master=False)
    other.set("key", "value")
    assert store.get("key") == b"value"
    listening = [
        columns[1].partition(":")[0]
        for table in ("tcp", "tcp6")
        for columns in map(str.split, Path(f"/proc/self/net/{table}").read_text().splitlines()[1:])
        if columns[3] == "0A" and columns[1].endswith(f":{store.port:04X}")
    ]
    assert listening == ["0100007F"]
    with pytest.raises(OSError, match="in use"):
        open_store("127.0.0.1", store.port)


class LateStore:
    """A store in which rank 0's word comes late, and the answer "not there yet" so late that it has left meanwhile."""

    def __init__(self, store, client):
        self._store, self._client = store, client

    def __getattr__(self, name):
        return getattr(self._store, name)

    def set(self, key, value):
        if key.endswith("/made/0"):
            time.sleep(1)
        self._store.set(key, value)

    def check(self, keys):
        found = self._store.check(keys)
        end = time.monotonic() + 30
        while not found and keys[0].endswith("/made/0") and not self._client.records and time.monotonic() < end:
            time.sleep(0.01)
        return found


def test_a_member_that_has_made_its_group_and_gone_is_no_failure(run_ranks):
    """Rank 1 finds rank 0 not yet there; before it checks the client, rank 0 has come, proceeded and left."""

    def body(rank, num_ranks, store):
        world = join_world(rank=rank, size=num_ranks, store=store, device="cpu", deadline_s=60)
        mesh = Mesh(dp=num_ranks)
        world.store = LateStore(world.store, world.client)
        ranks = list(mesh.group("dp", channel="another").ranks)
        if rank == 0:
            world.client.leave()  # as a process that ends by sys.exit does
        return ranks

    ended = run_ranks(2, body)
    assert [each.value or each.text for each in ended] == [[0, 1], [0, 1]]
