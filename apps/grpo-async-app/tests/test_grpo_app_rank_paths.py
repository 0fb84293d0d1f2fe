"""Each trainer rank sends weights to the engines on its device: what they learn, and an engine that dies in a sync.

CUDA IPC runs between processes of this machine with its handles replaced by shared memory of the host: what ranks,
engines and driver do is the same.
"""

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from grpo_runs import Main
from role_faults import accounting_complaints
from test_grpo_app_colocated import COLOCATED, NUM_TRAIN, learned

from grpo_async_app._fleet.events import LoggedEvents
from grpo_async_app._fleet.weights import WeightOffer, check_same_weights
from offbeat_core import OffbeatError, WeightProof, WeightSyncError
from offbeat_testing import RunningCommand
from offbeat_weightsync import BucketPlan, Route, SharedMemorySender, SharedMemoryStream, WeightSender, _receiver
from offbeat_weightsync._connection import Connection
from offbeat_weightsync._transports import shared_memory
from offbeat_weightsync._transports.shared_memory import CudaIpcTransport

TWO_RANKS = (*COLOCATED, "--engine.num_ranks=2", "--rollout.sync_bucket_bytes=65536", "--checkpoint.every=0")
BY_RANKS = (*TWO_RANKS, "--rollout.weight_transport=cuda-ipc")


def use_host_memory() -> None:
    """Let each rank send to the engine of its number, by memory of the host, with the checksums of device memory."""

    def open_sender(_: object, address: str, plan: BucketPlan, *, name: str) -> WeightSender:
        sender = SharedMemorySender(address, plan, name=name)
        sender._checksum = "words"
        return sender

    def assign(_: object, route: Route) -> list[int]:
        return [index % len(route.senders) for index in range(len(route.receivers))]

    CudaIpcTransport.complaint = classmethod(lambda *_: "")  # type: ignore[method-assign, assignment]
    CudaIpcTransport.assign = classmethod(assign)  # type: ignore[method-assign, assignment]
    CudaIpcTransport.open_sender = open_sender  # type: ignore[method-assign, assignment]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_engines_that_two_ranks_send_to_learn_what_those_of_one_rank_do(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    def main() -> None:
        use_host_memory()
        forked_main()

    ways = {"by one": (*TWO_RANKS, "--rollout.weight_transport=shared-memory"), "by ranks": BY_RANKS}
    for name, words in ways.items():
        with RunningCommand(main, "train", config, "--out", tmp_path / name, *words) as process:
            assert process.wait() == 0, process.output
    assert learned(tmp_path / "by ranks") == learned(tmp_path / "by one")
    logs = [(tmp_path / "by ranks" / "logs" / f"trainer-{rank}.log").read_text() for rank in range(2)]
    assert [log.count("to 1 engine,") for log in logs] == [6, 6], "the first weights, and those of each update"


@pytest.mark.timeout(300)
def test_an_engine_that_dies_in_a_sync_is_named_and_all_ranks_gather_to_the_end(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    """Rank 1 sends to it, rank 0 to the other engine, and each gathers every tensor with the other."""
    await_filled, died = SharedMemoryStream._await_filled, tmp_path / "died"

    def die_once(stream: SharedMemoryStream, index: int) -> int:
        if stream._connection.peer == "trainer-1" and (stream.version, index) == (2, 2) and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return await_filled(stream, index)

    def main() -> None:
        use_host_memory()
        SharedMemoryStream._await_filled = die_once  # type: ignore[method-assign]
        forked_main()

    run = tmp_path / "run"
    with RunningCommand(main, "train", config, "--out", run, *BY_RANKS) as process:
        assert process.wait(120) == 0, process.output
        output = process.output
    assert died.exists()
    assert "rollout-1" in output
    first, second = ((run / "logs" / f"trainer-{rank}.log").read_text() for rank in range(2))
    assert "rollout-1 hung up or died while bucket 2 of 9 was awaited" in second
    assert [log.count("started: process") for log in (first, second)] == [1, 1]
    assert first.count("sent weights: version 2 to 1 engine") == 2, "and once more without the one that is gone"
    assert accounting_complaints(run, NUM_TRAIN, 1, per_update=4) == []


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_rank_that_dies_in_a_sync_is_named_and_the_trainer_starts_again(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    """The other rank sends to its own engine meanwhile, and is not waited for."""
    await_loaded, died = shared_memory.await_loaded, tmp_path / "died"

    def die_once(peers: list[Connection], plan: BucketPlan, index: int) -> None:
        is_second = any(peer.peer == "rollout-1" for peer in peers)
        if is_second and peers[0].deadline.waiting.endswith("version 2") and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        await_loaded(peers, plan, index)

    def main() -> None:
        use_host_memory()
        shared_memory.await_loaded = die_once
        forked_main()

    run = tmp_path / "run"
    with RunningCommand(main, "train", config, "--out", run, *BY_RANKS, "--checkpoint.every=1") as process:
        assert process.wait(120) == 0, process.output
        assert "trainer-1" in process.output
    assert died.exists()
    assert accounting_complaints(run, NUM_TRAIN, 1, per_update=4) == []


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["shared-memory", "cuda-ipc"])
def test_an_engine_that_cannot_load_ends_the_run_with_its_error_whoever_sends_to_it(
    forked_main: Main, config: Path, tmp_path: Path, transport: str
) -> None:
    await_filled, join = SharedMemoryStream._await_filled, _receiver.Join

    def fail(stream: SharedMemoryStream, index: int) -> int:
        if "rollout-1" in names and (stream.version, index) == (2, 2):
            raise ValueError("no room for it")
        return await_filled(stream, index)

    def note(name: str, *args: Any, **words: Any) -> Any:
        names.add(name)
        return join(name, *args, **words)

    def main() -> None:
        use_host_memory()
        SharedMemoryStream._await_filled = fail  # type: ignore[method-assign]
        _receiver.Join = note  # type: ignore[misc, assignment]
        forked_main()

    names: set[str] = set()
    words = (*TWO_RANKS, f"--rollout.weight_transport={transport}")
    with RunningCommand(main, "train", config, "--out", tmp_path / "run", *words) as process:
        assert process.wait(120) == 3, process.output
        assert "error: weight stream of version 2: no room for it" in process.output, process.output


class Trainer:
    """Three ranks, which answer a push with what their engines have proved."""

    def __init__(self, *answers: Any) -> None:
        self.socket_paths = [f"@{rank}" for rank in range(len(answers))]
        self.actors = [SimpleNamespace(name=f"trainer-{rank}") for rank in range(len(answers))]
        self.transfer_ids, self.address, self._answers = iter([7]), "1.1.1.1", list(answers)
        self.pushed: tuple[Any, ...] = ()

    async def listen(self, _: float) -> str:
        return "by tcp"

    async def call_each(self, method: str, *args: Any, **_: Any) -> list[Any]:
        self.pushed = (method, *args)
        return self._answers


def proof(*checksums: str) -> WeightProof:
    return WeightProof(version=3, num_tensors=2, checksums=checksums)


def push(trainer: Trainer, ranks: dict[str, tuple[int, ...]], reach: Any = "machine") -> list[list[str]]:
    async def scenario() -> list[list[str]]:
        offer = WeightOffer(trainer, 3, 9.0, LoggedEvents(), reach=reach, ranks=ranks)  # type: ignore[arg-type]
        engines: Any = [SimpleNamespace(name=f"rollout-{index}", address="1.1.1.1") for index in range(3)]
        sources = await offer.sources_for(engines)
        await offer.push(sources, "merged")
        return sources

    return asyncio.run(scenario())


def test_each_engine_asks_the_ranks_of_its_devices_and_each_rank_waits_for_as_many() -> None:
    trainer = Trainer([proof("a")], [proof("a")], [])
    ranks = {"rollout-0": (0,), "rollout-1": (1,), "rollout-2": (0, 1)}
    assert push(trainer, ranks) == [["@0"], ["@1"], ["@0", "@1"]]
    assert trainer.pushed == ("push_weights", 3, [2, 2, 0], 9.0, "", 7, "merged")
    assert push(Trainer([proof("a")], []), {}) == [["@0"]] * 3
    by_tcp = Trainer([proof("a")], [])
    assert push(by_tcp, {}, "network") == [["by tcp"]] * 3
    assert by_tcp.pushed == ("push_weights", 3, [3, 0], 9.0, "by tcp", 7, "merged")


def test_a_rank_that_sends_other_weights_than_the_first_is_named() -> None:
    check_same_weights({"trainer-0": proof("a", "b"), "trainer-3": proof("a", "b")})
    with pytest.raises(WeightSyncError, match="trainer-1 has sent other weights of version 3 than trainer-0"):
        push(Trainer([proof("a", "b")], [proof("a", "c")]), {"rollout-1": (1,)})


def test_the_error_of_the_rank_that_failed_by_itself_ends_a_push() -> None:
    heard = WeightSyncError("trainer-1 gave up: no room", is_peers=True)
    trainer = Trainer(heard, WeightSyncError("no room"))
    with pytest.raises(OffbeatError, match=r"^no room"):
        push(trainer, {"rollout-1": (1,)})
