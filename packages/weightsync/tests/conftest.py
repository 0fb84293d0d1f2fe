"""What the weight-sync tests share."""

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offbeat_weightsync import BucketPlan, WeightSender, describe_tensors, new_address, new_socket_path, open_sender

sys.path.insert(0, str(Path(__file__).parent))  # for the processes of weightsync_peers

from weightsync_peers import be_engine
from weightsync_ranks import RankTeam, RunRanks

# Processes are forked from a fresh one that has imported torch once, and nothing else has happened in.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["offbeat_weightsync"])


class Peer:
    """A process at the other end of a sync, and the texts it sends."""

    def __init__(self, target: Callable[..., None], *args: object) -> None:
        self._texts, theirs = PROCESSES.Pipe(duplex=False)
        self._process = PROCESSES.Process(target=target, args=(theirs, *args))
        self._process.start()
        theirs.close()

    def next_text(self) -> str:
        """Wait for what it has to say next."""
        assert self._texts.poll(30), "the process says nothing"
        return str(self._texts.recv())

    def wait_dead(self) -> None:
        """Wait until it is gone."""
        self._process.join(30)
        assert self._process.exitcode is not None, "the process lives on"

    def is_stopped(self) -> bool:
        """Whether it stands still, as after SIGSTOP."""
        return Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"

    def kill(self) -> None:
        """End it as `kill -9` does."""
        self._process.kill()

    def end(self) -> None:
        """Kill it, if it is still there."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self._texts.close()


StartEngine = Callable[..., Peer]
Listen = Callable[..., WeightSender]


@pytest.fixture
def address() -> str:
    """Where a sender of this test may listen."""
    return new_socket_path()


@pytest.fixture
def weights() -> dict[str, Tensor]:
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
def peers() -> Iterator[list[Peer]]:
    """Processes to end after the test."""
    started: list[Peer] = []
    yield started
    for peer in started:
        peer.end()


@pytest.fixture(params=["", "127.0.0.1"], ids=["shared-memory", "tcp"])
def host(request: pytest.FixtureRequest) -> str:
    """The transports between processes, for the tests that hold for each of them."""
    return str(request.param)


@pytest.fixture
def listen(host: str) -> Listen:
    """Make a sender of some weights that listens at an address of its own."""

    def make(weights: dict[str, Tensor], dtype: str | None = None, bucket_bytes: int = 4096) -> WeightSender:
        plan = BucketPlan.build(describe_tensors(weights.items(), dtype), bucket_bytes)
        return open_sender(new_address(host), plan, deadline_s=30)

    return make


@pytest.fixture
def start_engine(peers: list[Peer]) -> StartEngine:
    """Start an engine that asks for weights at an address; returns when it is about to connect."""

    def start(
        address: str, fault: str = "", *, name: str = "rollout-0", version: int = 1, deadline_s: float = 30
    ) -> Peer:
        peers.append(Peer(be_engine, address, name, version, deadline_s, fault))
        assert peers[-1].next_text() == "ready"
        return peers[-1]

    return start


@pytest.fixture
def start_peer(peers: list[Peer]) -> StartEngine:
    """Start a process that runs `target(texts, *args)`; returns when it says "ready"."""

    def start(target: Callable[..., None], *args: object) -> Peer:
        peers.append(Peer(target, *args))
        assert peers[-1].next_text() == "ready"
        return peers[-1]

    return start


@pytest.fixture
def run_ranks() -> Iterator[RunRanks]:
    """Run a body on several ranks: `run_ranks(3, body)`, with `body(group)`; says how each rank ended."""
    team = RankTeam()
    yield team.run
    team.kill()
