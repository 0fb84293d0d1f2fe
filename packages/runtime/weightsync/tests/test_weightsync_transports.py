"""Weights between processes: how they are gathered, sent and loaded, by shared memory and over TCP alike."""

import gc
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from weightsync_peers import (
    Weights,
    are_equal,
    be_trainer_that_dies,
    in_thread,
    load_into,
    plan_of,
    receive_all,
    receiving,
)

from offbeat_core import DeadlineError, WeightSyncError
from offbeat_weightsync import PeerStream, TcpSender, WeightSender, receive, tensor_checksums

# For tests that wait for a deadline.
tcp_at_night = pytest.mark.parametrize(
    "host",
    ["", pytest.param("127.0.0.1", marks=pytest.mark.nightly)],
    ids=["shared-memory", "tcp"],
)


def total(tensors: Iterable[Tensor]) -> str:
    return f"{sum(float(tensor.double().sum()) for tensor in tensors):.6f}"


def test_every_engine_holds_the_bytes_that_were_sent(sender: WeightSender, weights: Weights, start_engine: Any) -> None:
    engines = [start_engine(sender.address, name=f"rollout-{index}") for index in range(3)]
    proofs = sender.send(weights.items(), 1, 3)
    for engine in engines:
        assert engine.next_text() == f"holds 8 tensors of version 1, sum {total(weights.values())}"
    assert len(sender.plan.buckets) == 5  # so both slots are used more than once
    assert len(proofs) == 3
    assert len(set(proofs)) == 1
    assert (proofs[0].version, proofs[0].num_tensors, len(proofs[0].checksums)) == (1, 8, 5)


def test_the_master_weights_are_converted_to_the_engines_dtype(listen: Any, floats: Weights, start_engine: Any) -> None:
    with listen(floats, "bfloat16") as sender:
        engine = start_engine(sender.address)
        sender.send(floats.items(), 1, 1)
    expected = total(tensor.bfloat16() for tensor in floats.values())
    assert engine.next_text() == f"holds {len(floats)} tensors of version 1, sum {expected}"


def load_there(address: str, held: Weights) -> PeerStream:
    with receive(address, 1, 30) as stream:
        load_into(stream, held)
    return stream


def empty_like(weights: Weights) -> Weights:
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}


def test_engines_load_into_their_own_tensors_however_these_lie(sender: WeightSender, weights: Weights) -> None:
    rows, columns = empty_like(weights), empty_like(weights)
    columns["wide"] = torch.zeros(3, 1000).t()
    with in_thread(lambda: load_there(sender.address, rows)), in_thread(lambda: load_there(sender.address, columns)):
        assert len(set(sender.send(weights.items(), 1, 2))) == 1
    assert are_equal(rows, weights)
    assert are_equal(columns, weights)


def test_a_stream_that_is_over_holds_nothing_of_the_engines(listen: Any, weights: Weights) -> None:
    weights = {name: weights[name] for name in ("embed", "wide")}
    memory = {name: mmap.mmap(-1, tensor.nbytes) for name, tensor in weights.items()}
    held = {name: torch.frombuffer(memory[name], dtype=torch.float32).view(weights[name].shape) for name in weights}
    with listen(weights) as sender, in_thread(lambda: load_there(sender.address, held)) as streams:
        sender.send(weights.items(), 1, 1)
    assert isinstance(streams[0], PeerStream)
    held.clear()
    for each in memory.values():
        each.close()  # raises BufferError if it is still referenced


def test_an_engine_without_room_says_so_before_anything_is_written(sender: WeightSender, weights: Weights) -> None:
    held = empty_like(weights) | {"head": torch.zeros(3)}
    with (
        in_thread(lambda: load_there(sender.address, held)) as results,
        pytest.raises(WeightSyncError, match=r"^rollout-0 gave up: head: planned with shape \(16, 8\)"),
    ):
        sender.send(weights.items(), 1, 1)
    assert not held["embed"].any()
    assert "head: planned with shape" in str(results[0])


def test_one_sender_sends_version_after_version(sender: WeightSender, weights: Weights) -> None:
    for version in range(1, 6):
        weights["wide"].add_(1)
        with receiving(sender.address, version) as held:
            sender.send(weights.items(), version, 1)
        assert are_equal(held[0], weights)


@tcp_at_night
def test_an_engine_that_stands_still_is_named_at_the_deadline(
    sender: WeightSender, weights: Weights, start_engine: Any
) -> None:
    start_engine(sender.address, "stop at wide", name="rollout-7")
    with pytest.raises(DeadlineError) as caught:
        sender.send(weights.items(), 1, 1, deadline_s=5)
    # Over TCP the kernel takes a few windows for it.
    what = "to prove what it holds" if isinstance(sender, TcpSender) else "to load bucket"
    assert f"weight sync of version 1: waited 5 s for rollout-7 {what}" in str(caught.value)


@pytest.mark.parametrize("num_receivers", [1, 2])
def test_an_engine_that_is_given_up_in_the_middle_of_a_sync_is_waited_for_no_longer(
    sender: WeightSender, weights: Weights, start_engine: Any, num_receivers: int
) -> None:
    """Stop it, as if its machine were gone: no message comes from it again, not even the end of its connection."""
    engine = start_engine(sender.address, "stop at wide")
    for number in range(1, num_receivers):
        start_engine(sender.address, name=f"rollout-{number}")
    with pytest.raises(WeightSyncError, match="weight sync of version 1 was withdrawn while it waited for rollout-0"):
        sender.send(weights.items(), 1, num_receivers, deadline_s=60, is_withdrawn=engine.is_stopped)


@tcp_at_night
def test_engines_that_do_not_come_are_counted_at_the_deadline(
    sender: WeightSender, weights: Weights, start_engine: Any
) -> None:
    engine = start_engine(sender.address)
    with pytest.raises(DeadlineError, match=r"for 1 of 2 receivers to connect \(here: rollout-0\)"):
        sender.send(weights.items(), 1, 2, deadline_s=4)
    assert "WeightSyncError: trainer-0 gave up: weight sync of version 1: waited 4 s" in engine.next_text()


def test_a_later_version_than_is_sent_fails_both_sides(
    sender: WeightSender, weights: Weights, start_engine: Any
) -> None:
    engine = start_engine(sender.address, version=3)
    with pytest.raises(WeightSyncError, match="rollout-0 asked for version 3; version 2 is being sent"):
        sender.send(weights.items(), 2, 1)
    assert "rollout-0 asked for version 3; version 2 is being sent" in engine.next_text()


def test_an_engine_left_over_from_an_earlier_version_is_sent_away(
    sender: WeightSender, weights: Weights, start_engine: Any
) -> None:
    late = start_engine(sender.address, version=1, name="late-0")
    with in_thread(lambda: sender.send(weights.items(), 2, 1)):
        assert "version 1 was asked for; trainer-0 sends version 2" in late.next_text()
        punctual = start_engine(sender.address, version=2)
    assert punctual.next_text().startswith("holds 8 tensors of version 2")


def test_an_engine_whose_sender_does_not_send_stops_at_its_deadline(sender: WeightSender) -> None:
    words = r"version 1 at rollout-0: waited 0.2 s for the sender.* \(its (plan|greeting)\)"
    with pytest.raises(DeadlineError, match=words):
        receive_all(sender.address, 1, deadline_s=0.2)


def test_a_stream_is_read_once_and_whole_before_it_is_proved(sender: WeightSender, weights: Weights) -> None:
    def misuse() -> None:
        with receive(sender.address, 1, 30) as stream:
            with pytest.raises(WeightSyncError, match="read the whole weight stream before"):
                stream.prove(weights.__getitem__)
            list(stream)
            with pytest.raises(WeightSyncError, match="can be read once"):
                list(stream)
            stream.confirm(stream.prove(weights.__getitem__))

    with in_thread(misuse) as results:
        sender.send(weights.items(), 1, 1)
    assert results == [None]


def test_a_trainer_that_dies_is_named_at_once_and_leaves_nothing(host: str, start_peer: Any) -> None:
    def leftovers() -> set[str]:
        return {*os.listdir("/dev/shm"), *(name for name in os.listdir("/tmp") if "offbeat-" in name)}

    before = leftovers()
    trainer = start_peer(be_trainer_that_dies, host)
    address = trainer.next_text()
    begin = time.monotonic()
    with pytest.raises(WeightSyncError, match="trainer-0 hung up or died"):
        receive_all(address, 1, deadline_s=60)
    assert time.monotonic() - begin < 30  # at once, not at the deadline
    trainer.process.join(30)
    if not host:
        left = leftovers() - before  # of this trainer; what tests beside this one make does not stay
        end_s = time.monotonic() + 30
        while left and time.monotonic() < end_s:
            time.sleep(0.05)
            left &= leftovers()
        assert left == set()
        assert address not in Path("/proc/net/unix").read_text()
    with pytest.raises(WeightSyncError, match=r"no sender listens at .*: Connection refused"):
        receive_all(address, 1)


@pytest.mark.parametrize("bucket_bytes", [64, 128, 1 << 20])
def test_a_split_tensor_and_a_whole_one_are_equal_at_any_bucket_size(
    listen: Any, weights: Weights, bucket_bytes: int
) -> None:
    with listen(weights, None, bucket_bytes) as sender, receiving(sender.address) as held:
        sender.send(weights.items(), 1, 1)
    assert are_equal(held[0], weights)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_syncs_leave_no_files_open(listen: Any, weights: Weights) -> None:
    gc.collect()
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with listen(weights) as sender, receiving(sender.address):
            sender.send(weights.items(), 1, 1)
    assert len(os.listdir("/proc/self/fd")) <= len(before), "fewer: another test's may close at any moment"


class Engine:
    """Holds copies of the weights as planned, says so, and is sent what has changed."""

    def __init__(self, sender: WeightSender, weights: Weights) -> None:
        self.address, self.specs = sender.address, sender.plan.specs
        self.held = {spec.name: weights[spec.name].to(getattr(torch, spec.dtype), copy=True) for spec in self.specs}

    def checksums(self) -> dict[str, str]:
        return tensor_checksums(self.specs, self.held.__getitem__)

    def take(self, says: dict[str, str] | None) -> list[str]:
        """Names of what it was sent."""
        with receive(self.address, 1, 20, held=says) as stream:
            load_into(stream, self.held)
            return [spec.name for spec in stream.plan.specs]

    def holds(self, weights: Weights) -> bool:
        return all(torch.equal(tensor, weights[name].to(tensor.dtype)) for name, tensor in self.held.items())


@pytest.mark.parametrize(
    ("change", "sent"),
    [
        (1.0, ["wide"]),
        (1e-8, ["scale"]),  # below bfloat16's resolution; but a version comes with a proof, of the smallest tensor
    ],
)
def test_only_what_changed_is_sent(listen: Any, weights: Weights, change: float, sent: list[str]) -> None:
    with listen(weights, "bfloat16") as sender:
        engine = Engine(sender, weights)
        weights["wide"].add_(change)
        with in_thread(lambda: engine.take(engine.checksums())) as received:
            (proof,) = sender.send_changed(weights.items, 1, 1)
    assert received == [sent]
    assert proof.num_tensors == 1
    assert engine.holds(weights)


def test_engines_that_hold_different_things_get_what_either_lacks(sender: WeightSender, weights: Weights) -> None:
    engines = [Engine(sender, weights) for _ in range(2)]
    engines[0].held["scale"].add_(1)
    engines[1].held["wide"].view(torch.uint8).view(-1)[3] ^= 1  # has lost a byte
    takes: list[Callable[[], object]] = [lambda one=one: one.take(one.checksums()) for one in engines]
    with in_thread(takes[0]) as first, in_thread(takes[1]) as second:
        sender.send_changed(weights.items, 1, 2)
    assert first == second == [["wide", "scale"]]
    assert all(engine.holds(weights) for engine in engines)


def test_an_engine_that_does_not_say_what_it_holds_gets_everything(sender: WeightSender, weights: Weights) -> None:
    with in_thread(lambda: Engine(sender, weights).take(None)) as received:
        sender.send_changed(weights.items, 1, 1)
    assert received == [list(weights)]


def test_changes_are_refused_by_an_engine_that_holds_something_else(
    sender: WeightSender, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(sender, weights)
    # A sender with a fault: it leaves out a tensor that the engine does not hold as it should.
    only_embed = plan_of({"embed": weights["embed"]})
    monkeypatch.setattr("offbeat_weightsync._sender.plan_changes", lambda *_: only_embed)
    words = "sends changes to other weights than are held here; ask for everything"
    with (
        in_thread(lambda: engine.take(engine.checksums() | {"norm": "0" * 16})) as received,
        pytest.raises(WeightSyncError, match=words),
    ):
        sender.send_changed(weights.items, 1, 1)
    assert words in str(received[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head": None}, "head: planned, but the trainer's tensors ended before it"),
        ({"extra": torch.ones(1)}, "extra: names and order must be those of the plan"),
        ({"norm": torch.ones(9)}, r"norm: planned with shape \(7,\), the trainer has \(9,\)"),
    ],
)
def test_changes_of_tensors_that_are_not_those_of_the_plan_are_refused(
    sender: WeightSender, weights: Weights, change: dict[str, Tensor | None], words: str
) -> None:
    given = [(name, tensor) for name, tensor in (weights | change).items() if tensor is not None]
    engine = Engine(sender, weights)
    with in_thread(lambda: engine.take(engine.checksums())) as received, pytest.raises(WeightSyncError, match=words):
        sender.send_changed(lambda: given, 1, 1)
    assert isinstance(received[0], WeightSyncError)
