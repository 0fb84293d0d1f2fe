"""What the weight-sync tests share."""

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat_weightsync import (
    DiskSender,
    GroupSender,
    WeightCopy,
    WeightSender,
    new_address,
    new_socket_path,
    open_sender,
)

sys.path.insert(0, str(Path(__file__).parent))  # for the processes of weightsync_peers

from weightsync_peers import Sync, Weights, be_engine, be_keeping_engine, give, plan_of, said_by

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
        """Return whether it is stopped, as after SIGSTOP."""
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


@pytest.fixture(params=["shared-memory", "tcp", "changes", "group", "disk"])
def sync(request: pytest.FixtureRequest, weights: Weights, start_engine: Any, start_peer: Any, tmp_path: Path) -> Sync:
    if request.param == "changes":
        return _by_changes(weights, start_peer)
    opened: dict[str, Callable[..., WeightSender]] = {
        "shared-memory": lambda *how, **settings: open_sender(new_address(), *how, **settings),
        "tcp": lambda *how, **settings: open_sender(new_address("127.0.0.1"), *how, **settings),
        "group": lambda *how, **settings: GroupSender(new_address("127.0.0.1"), *how, **settings),
        "disk": lambda *how, **settings: DiskSender(new_address("127.0.0.1"), *how, tmp_path, **settings),
    }
    return _by_connection(weights, opened[request.param], start_engine)


def _by_connection(weights: Weights, open_it: Callable[..., WeightSender], start_engine: Any) -> Sync:
    def run(fault: str) -> list[str]:
        with open_it(plan_of(weights), deadline_s=30) as sender:
            engines = [start_engine(sender.address, fault), start_engine(sender.address, name="rollout-1")]
            said = [said_by(lambda: sender.send(give(weights, fault), 1, 2))]
            said += [engine.next_text() for engine in engines]
            later = start_engine(sender.address, version=2)
            sender.send(weights.items(), 2, 1)
            assert later.next_text().startswith("holds 8 tensors")
            return said

    return run


def _by_changes(weights: Weights, start_peer: Any) -> Sync:
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
