"""What the weight-sync tests share."""

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat_mesh import Group
from offbeat_weightsync import (
    WeightCopy,
    WeightSender,
    broadcast_weights,
    list_versions,
    new_address,
    new_socket_path,
    open_sender,
    read_weights,
    receive_broadcast,
    wait_for_proofs,
    write_weights,
)

sys.path.insert(0, str(Path(__file__).parent))  # for the processes of weightsync_peers

from weightsync_peers import Sync, Weights, be_engine, be_keeping_engine, give, plan_of, said_by, take
from weightsync_ranks import RankTeam, RunRanks

# Processes are forked from a fresh one that has imported torch once, and nothing else has happened in.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["offbeat_weightsync"])


class Peer:
    """A process at the other end of a sync, and the texts it sends."""

    def __init__(self, target: Callable[..., None], *args: object) -> None:
        self._texts, theirs = PROCESSES.Pipe(duplex=False)
        self.process = PROCESSES.Process(target=target, args=(theirs, *args))
        self.process.start()
        theirs.close()
        assert self.next_text() == "ready"

    def next_text(self) -> str:
        """Wait for what it has to say next; "" if it has died."""
        assert self._texts.poll(30), "the process says nothing"
        try:
            return str(self._texts.recv())
        except EOFError:
            return ""

    def is_stopped(self) -> bool:
        """Whether it stands still, as after SIGSTOP."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"

    def end(self) -> None:
        """Kill it, if it is still there."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self._texts.close()


@pytest.fixture
def address() -> str:
    """Where a sender of this test may listen."""
    return new_socket_path()


@pytest.fixture
def weights() -> Weights:
    """Tensors of several shapes and dtypes; `head` is tied to `embed`; `wide` is longer than a bucket of 4096."""
    draw = torch.Generator().manual_seed(0)
    embed = torch.randn(16, 8, generator=draw)
    return {
        "embed": embed,
        "wide": torch.randn(1000, 3, generator=draw),
        "norm": torch.randn(7, generator=draw).bfloat16(),
        "scale": torch.tensor(0.5, dtype=torch.float64),
        "strided": torch.randn(6, 8, generator=draw).t()[::2],
        "steps": torch.arange(5),
        "flags": torch.tensor([True, False, True]),
        "head": embed,
    }


@pytest.fixture
def floats(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}


@pytest.fixture(params=["", "127.0.0.1"], ids=["shared-memory", "tcp"])
def host(request: pytest.FixtureRequest) -> str:
    """The transports between processes, for the tests that hold for each of them."""
    return str(request.param)


@pytest.fixture
def listen(host: str) -> Callable[..., WeightSender]:
    """Make a sender of some weights that listens at an address of its own."""
    return lambda weights, *how: open_sender(new_address(host), plan_of(weights, *how), deadline_s=30)


@pytest.fixture
def sender(listen: Callable[..., WeightSender], weights: Weights) -> Iterator[WeightSender]:
    with listen(weights) as sender:
        yield sender


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    """Start a process that runs `target(texts, *args)`; returns when it says "ready"."""
    started: list[Peer] = []

    def start(target: Callable[..., None], *args: object) -> Peer:
        started.append(Peer(target, *args))
        return started[-1]

    yield start
    for peer in started:
        peer.end()


@pytest.fixture
def start_engine(start_peer: Callable[..., Peer]) -> Callable[..., Peer]:
    """Start an engine that asks for weights at an address; returns when it is about to connect."""

    def start(address: str, fault: str = "", *, name: str = "rollout-0", version: int = 1) -> Peer:
        return start_peer(be_engine, address, name, version, 30.0, fault)

    return start


@pytest.fixture
def run_ranks() -> Iterator[RunRanks]:
    """Run a body on several ranks: `run_ranks(3, body)`, with `body(group)`; says how each rank ended."""
    team = RankTeam()
    yield team.run
    team.kill()


@pytest.fixture(params=["shared-memory", "tcp", "changes", "group", "disk"])
def sync(request: pytest.FixtureRequest, weights: Weights, tmp_path: Path) -> Sync:
    if request.param == "group":
        return Sync(_by_group(weights, request.getfixturevalue("run_ranks")), "rank 0", "rank 1")
    if request.param == "disk":
        return Sync(_by_disk(weights, tmp_path), "", "rollout-0")
    if request.param == "changes":
        run = _by_changes(weights, request.getfixturevalue("start_peer"))
        return Sync(run, "trainer-0", "rollout-0", "trainer-0 gave up: ")
    host = "127.0.0.1" if request.param == "tcp" else ""
    run = _by_connection(weights, host, request.getfixturevalue("start_engine"))
    return Sync(run, "trainer-0", "rollout-0", "trainer-0 gave up: ")


def _by_connection(weights: Weights, host: str, start_engine: Any) -> Callable[[str], list[str]]:
    def run(fault: str) -> list[str]:
        with open_sender(new_address(host), plan_of(weights), deadline_s=30) as sender:
            engines = [start_engine(sender.address, fault), start_engine(sender.address, name="rollout-1")]
            said = [said_by(lambda: sender.send(give(weights, fault), 1, 2))]
            said += [engine.next_text() for engine in engines]
            later = start_engine(sender.address, version=2)
            sender.send(weights.items(), 2, 1)
            assert later.next_text().startswith("holds 8 tensors")
            return said

    return run


def _by_changes(weights: Weights, start_peer: Any) -> Callable[[str], list[str]]:
    """Engines that hold other weights are sent what is different."""
    before = {name: tensor.clone() for name, tensor in weights.items()}
    before["wide"].view(-1)[7::70] += 1
    before["head"].view(-1)[3] += 1

    def run(fault: str) -> list[str]:
        copy = WeightCopy(max_changes=9)
        with open_sender(new_address("127.0.0.1"), plan_of(weights), deadline_s=30) as sender:
            names = ("rollout-0", fault), ("rollout-1", "")
            engines = [start_peer(be_keeping_engine, sender.address, *each) for each in names]
            sender.send(before.items(), 0, 2, copy=copy)
            said = [said_by(lambda: sender.send(give(weights, fault), 1, 2, copy=copy))]
            said += [engine.next_text() for engine in engines]
            later = start_peer(be_keeping_engine, sender.address, "rollout-0", "", 2)
            sender.send(before.items(), 2, 1, copy=copy)
            sender.send(weights.items(), 3, 1, copy=copy)
            assert later.next_text().startswith("holds 8 tensors, sent as changes")
            return said

    return run


def _by_group(weights: Weights, run_ranks: RunRanks) -> Callable[[str], list[str]]:
    def sync_once(group: Group, version: int, fault: str) -> object:
        if group.rank == 0:
            return broadcast_weights(group, plan_of(weights), give(weights, fault), version, deadline_s=20)
        with receive_broadcast(group, version, deadline_s=20) as stream:
            return take(stream, fault if group.rank == 1 else "")

    def run(fault: str) -> list[str]:
        def body(group: Group) -> str:
            said = said_by(lambda: sync_once(group, 1, fault))
            if "die" not in fault:
                assert said_by(lambda: sync_once(group, 2, "")) == ("has 8" if group.rank else "has 2")
            return said

        return run_ranks(3, body)

    return run


def _by_disk(weights: Weights, root: Path) -> Callable[[str], list[str]]:
    def write(version: int, fault: str) -> Path:
        return write_weights(root, plan_of(weights), give(weights, fault), version, file_bytes=4000)

    def read(version: int, name: str, fault: str = "") -> Weights:
        with read_weights(root, version, deadline_s=10, name=name) as stream:
            return take(stream, fault)

    def run(fault: str) -> list[str]:
        said = [said_by(lambda: [write(1, fault)])]
        if list_versions(root):
            engines = [said_by(lambda: read(1, "rollout-0", fault)), said_by(lambda: read(1, "rollout-1"))]
            said = [said_by(lambda: wait_for_proofs(root, 1, 2, deadline_s=5)), *engines]
        write(2, "")
        assert len(read(2, "rollout-0")) == 8
        return said

    return run
