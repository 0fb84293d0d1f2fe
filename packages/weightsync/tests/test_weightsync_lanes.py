"""Weights that go in several lanes arrive whole and proved, or both sides say what went wrong."""

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from weightsync_peers import be_trainer

from offbeat_types import DeadlineError, WeightSyncError
from offbeat_weightsync import BucketPlan, PeerStream, WeightSender, _rounds, describe_tensors, receive
from offbeat_weightsync._connections import Connection, Deadline
from offbeat_weightsync._lanes import assign_lanes, choose_cpus, run_lanes

BUCKET_BYTES = 128 << 10
Listen = Callable[..., WeightSender]

pytestmark = pytest.mark.skipif((os.cpu_count() or 1) < 2 or not choose_cpus(9), reason="lanes need two cores")


@pytest.fixture
def weights() -> dict[str, Tensor]:
    """Nine buckets; `wide` goes through both lanes."""
    draw = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(100, 300, generator=draw),
        "wide": torch.randn(700, 300, generator=draw),
        "norm": torch.randn(7, generator=draw).bfloat16(),
        "head": torch.randn(100, 300, generator=draw),
    }


@pytest.fixture
def make_sender(listen: Listen) -> Listen:
    """A sender whose plan has buckets for several lanes."""

    def make(weights: dict[str, Tensor], dtype: str | None = None) -> WeightSender:
        sender = listen(weights, dtype, BUCKET_BYTES)
        assert choose_cpus(len(sender.plan.buckets))
        return sender

    return make


def take(address: str, held: dict[str, Tensor], found: list[object], deadline_s: float = 30) -> threading.Thread:
    """Load in a thread; the list gets "held" or the error."""

    def run() -> None:
        try:
            with receive(address, 1, deadline_s) as stream:
                stream.load(held.__getitem__)
                stream.confirm(stream.prove(held.__getitem__))
            found.append("held")
        except (WeightSyncError, DeadlineError, ValueError) as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_engines_hold_the_bytes_that_were_sent_whether_they_load_or_iterate(
    make_sender: Listen, weights: dict[str, Tensor], start_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_lanes = []

    def counted(bodies: Any, *rest: Any) -> None:
        num_lanes.append(len(bodies))
        run_lanes(bodies, *rest)

    monkeypatch.setattr(_rounds, "run_lanes", counted)
    held = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}
    held["embed"] = torch.zeros(300, 100).t()  # does not lie in a row, so this engine loads in one lane after the other
    rows = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}
    found: list[object] = []
    with make_sender(weights) as sender:
        threads = [take(sender.address, held, found), take(sender.address, rows, found)]
        engine = start_engine(sender.address)
        proofs = sender.send(weights.items(), 1, 3)
        for thread in threads:
            thread.join()
        assert engine.next_text().startswith("holds 4 tensors of version 1")
    assert found == ["held", "held"]
    assert num_lanes[0] >= 2
    assert proofs[0] == proofs[1] == proofs[2]
    for name, tensor in weights.items():
        assert torch.equal(held[name], tensor)
        assert torch.equal(rows[name], tensor)


def test_a_stream_that_is_over_holds_nothing_of_the_engines(make_sender: Listen, weights: dict[str, Tensor]) -> None:
    memory = {name: mmap.mmap(-1, tensor.nbytes) for name, tensor in weights.items()}
    held = {name: torch.from_numpy(np.frombuffer(memory[name], np.uint8)).view(weights[name].dtype) for name in weights}
    streams: list[PeerStream] = []

    def keep() -> None:
        with receive(sender.address, 1, 30) as stream:
            stream.load(held.__getitem__)
            stream.confirm(stream.prove(lambda name: held[name].view(weights[name].shape)))
            streams.append(stream)

    with make_sender(weights) as sender:
        thread = threading.Thread(target=keep)
        thread.start()
        sender.send(weights.items(), 1, 1)
        thread.join()
    (over,) = streams
    over.close()  # it has been closed already
    held.clear()
    for each in memory.values():
        each.close()  # raises BufferError if anybody still looks at it


def test_lanes_convert_and_prove_what_one_lane_does(make_sender: Listen, weights: dict[str, Tensor]) -> None:
    held = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in weights.items()}
    with make_sender(weights, "bfloat16") as sender:
        for tensors in (weights.items(), iter(weights.items())):  # an iterator goes in one lane
            found: list[object] = []
            thread = take(sender.address, held, found)
            proofs = sender.send(tensors, 1, 1)
            thread.join()
            assert found == ["held"]
            assert all(torch.equal(held[name], weights[name].bfloat16()) for name in weights)
            held["wide"].zero_()
            assert proofs[0].num_tensors == 4


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("flip wide", "rollout-7 gave up: the engine holds other bytes than were sent, in bucket"),
        ("refuse wide", "rollout-7 gave up: ValueError: no room for wide"),
        ("die at wide", "rollout-7 hung up or died"),
        ("die at head", "rollout-7 hung up or died"),
    ],
)
def test_an_engine_that_fails_or_dies_is_named_on_all_sides(
    make_sender: Listen, weights: dict[str, Tensor], start_engine: Any, fault: str, words: str
) -> None:
    held = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}
    found: list[object] = []
    with make_sender(weights) as sender:
        start_engine(sender.address, fault, name="rollout-7")
        thread = take(sender.address, held, found)
        with pytest.raises(WeightSyncError, match=words):
            sender.send(weights.items(), 1, 2)
        thread.join()
        assert f"trainer-0 gave up: {words}" in str(found[0])
        start_engine(sender.address)  # the sender is as good as new
        sender.send(weights.items(), 1, 1)


def test_an_engine_without_room_says_so_before_anything_is_written(
    make_sender: Listen, weights: dict[str, Tensor]
) -> None:
    held = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}
    held["head"] = torch.zeros(3)
    found: list[object] = []
    with make_sender(weights) as sender:
        thread = take(sender.address, held, found)
        with pytest.raises(WeightSyncError, match=r"^rollout-0 gave up: head: planned with shape \(100, 300\)"):
            sender.send(weights.items(), 1, 1)
        thread.join()
    assert not held["embed"].any()
    assert "head: planned with shape" in str(found[0])


def test_tensors_that_differ_from_the_plan_fail_both_sides(make_sender: Listen, weights: dict[str, Tensor]) -> None:
    held = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}
    found: list[object] = []
    with make_sender(weights) as sender:
        thread = take(sender.address, held, found)
        with pytest.raises(WeightSyncError, match="head: planned, but the trainer's tensors ended before it"):
            sender.send(list(weights.items())[:-1], 1, 1)
        thread.join()
    assert not any(tensor.any() for tensor in held.values())
    assert "trainer-0 gave up: head: planned, but" in str(found[0])


def test_an_engine_that_stands_still_is_named_at_the_deadline(
    make_sender: Listen, weights: dict[str, Tensor], start_engine: Any
) -> None:
    with make_sender(weights) as sender:
        start_engine(sender.address, "stop at wide", name="rollout-7")
        with pytest.raises(DeadlineError, match="waited 5 s for rollout-7"):
            sender.send(weights.items(), 1, 1, deadline_s=5)


def test_a_trainer_that_dies_between_two_buckets_is_named_at_once(host: str, start_peer: Any) -> None:
    trainer = start_peer(be_trainer, host)

    def read_one(stream: PeerStream) -> None:
        for _ in stream:
            time.sleep(0.2)  # all that fits between the two is on its way by now
            trainer.kill()

    with (
        pytest.raises(WeightSyncError, match="trainer-0 hung up or died"),
        receive(trainer.next_text(), 1, 30) as stream,
    ):
        read_one(stream)


def test_buckets_are_spread_over_the_lanes_so_that_all_have_the_same_to_do(weights: dict[str, Tensor]) -> None:
    plan = BucketPlan.build(describe_tensors(weights.items()), BUCKET_BYTES)
    for num_lanes in (1, 2, 3):
        lanes = assign_lanes(plan, num_lanes)
        loads = [0] * num_lanes
        for lane, bucket in zip(lanes, plan.buckets, strict=True):
            loads[lane] += bucket.num_bytes
        assert sum(loads) == sum(bucket.num_bytes for bucket in plan.buckets)
        assert max(loads) - min(loads) <= BUCKET_BYTES


def test_all_lanes_that_look_at_once_hear_why_the_other_side_gives_up() -> None:
    for _ in range(20):
        ours, theirs = socket.socketpair()
        deadline = Deadline("weight sync of version 1", 30.0)
        principal, other = Connection(ours, "rollout-0", deadline), Connection(theirs, "trainer-0", deadline)
        other.fail("head: no room " + "." * 10_000)
        other.close()
        with ThreadPoolExecutor(4) as lanes:
            found = [lane.result() for lane in [lanes.submit(principal.last_words) for _ in range(4)]]
        principal.close()
        assert {str(error).partition(" .")[0] for error in found} == {"rollout-0 gave up: head: no room"}
