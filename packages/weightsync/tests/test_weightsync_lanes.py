"""Weights that go in several lanes arrive whole and proved, or both sides say what went wrong."""

import os
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from weightsync_peers import be_trainer

from offbeat_types import DeadlineError, WeightSyncError
from offbeat_weightsync import BucketPlan, SharedMemorySender, SharedMemoryStream, _rounds, describe_tensors, receive
from offbeat_weightsync._lanes import assign_slots, choose_cpus, run_lanes
from offbeat_weightsync._windows import cut_windows

BUCKET_BYTES = 128 << 10

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


def make_sender(address: str, weights: dict[str, Tensor], dtype: str | None = None) -> SharedMemorySender:
    plan = BucketPlan.build(describe_tensors(weights.items(), dtype), BUCKET_BYTES)
    assert choose_cpus(len(plan.buckets))
    return SharedMemorySender(address, plan, deadline_s=30)


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
    address: str, weights: dict[str, Tensor], start_engine: Any, monkeypatch: pytest.MonkeyPatch
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
    with make_sender(address, weights) as sender:
        threads = [take(address, held, found), take(address, rows, found)]
        engine = start_engine()
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


def test_lanes_convert_and_prove_what_one_lane_does(address: str, weights: dict[str, Tensor]) -> None:
    held = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in weights.items()}
    with make_sender(address, weights, "bfloat16") as sender:
        for tensors in (weights.items(), iter(weights.items())):  # an iterator goes in one lane
            found: list[object] = []
            thread = take(address, held, found)
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
    address: str, weights: dict[str, Tensor], start_engine: Any, fault: str, words: str
) -> None:
    held = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}
    found: list[object] = []
    with make_sender(address, weights) as sender:
        start_engine(fault, name="rollout-7")
        thread = take(address, held, found)
        with pytest.raises(WeightSyncError, match=words):
            sender.send(weights.items(), 1, 2)
        thread.join()
        assert f"trainer-0 gave up: {words}" in str(found[0])
        start_engine()  # the sender is as good as new
        sender.send(weights.items(), 1, 1)


def test_an_engine_without_room_says_so_before_anything_is_written(address: str, weights: dict[str, Tensor]) -> None:
    held = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}
    held["head"] = torch.zeros(3)
    found: list[object] = []
    with make_sender(address, weights) as sender:
        thread = take(address, held, found)
        with pytest.raises(WeightSyncError, match=r"^rollout-0 gave up: head: planned with shape \(100, 300\)"):
            sender.send(weights.items(), 1, 1)
        thread.join()
    assert not held["embed"].any()
    assert "head: planned with shape" in str(found[0])


def test_tensors_that_differ_from_the_plan_fail_both_sides(address: str, weights: dict[str, Tensor]) -> None:
    found: list[object] = []
    with make_sender(address, weights) as sender:
        thread = take(address, {}, found)
        with pytest.raises(WeightSyncError, match="head: planned, but the trainer's tensors ended before it"):
            sender.send(list(weights.items())[:-1], 1, 1)
        thread.join()
    assert "trainer-0 gave up: head: planned, but" in str(found[0])


def test_an_engine_that_stands_still_is_named_at_the_deadline(
    address: str, weights: dict[str, Tensor], start_engine: Any
) -> None:
    with make_sender(address, weights) as sender:
        start_engine("stop at wide", name="rollout-7")
        with pytest.raises(DeadlineError, match="waited 2 s for rollout-7"):
            sender.send(weights.items(), 1, 1, deadline_s=2)


def test_a_trainer_that_dies_between_two_buckets_is_named_at_once(address: str, start_peer: Any) -> None:
    trainer = start_peer(be_trainer, address)

    def read_one(stream: SharedMemoryStream) -> None:
        for _ in stream:
            trainer.kill()

    with (
        pytest.raises(WeightSyncError, match="trainer-0 hung up or died"),
        receive(address, 1, 30) as stream,
    ):
        read_one(stream)


def test_each_lane_has_slots_of_its_own_and_uses_them_in_turn(weights: dict[str, Tensor]) -> None:
    plan = BucketPlan.build(describe_tensors(weights.items()), BUCKET_BYTES)
    windows = cut_windows(plan, BUCKET_BYTES // 4)
    assert sum(piece.num_bytes for window in windows for piece in window.pieces) == plan.num_bytes
    for num_lanes in (1, 2, 3):
        places = assign_slots(windows, num_lanes, 2 * num_lanes)
        used = Counter(places)
        assert {slot // 2 for _, slot in used} == set(range(num_lanes))
        assert all(slot // 2 == lane for lane, slot in used)
        assert all(lane == window.bucket % num_lanes for (lane, _), window in zip(places, windows, strict=True))
