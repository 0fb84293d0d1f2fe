"""Weights between processes arrive whole and proved, or both sides say what went wrong: by each transport alike."""

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
from weightsync_peers import be_trainer_that_dies, in_thread, receive_all

from offbeat_types import DeadlineError, WeightSyncError
from offbeat_weightsync import PeerStream, describe_tensors, receive, tensor_checksums

# For tests that wait for a deadline.
tcp_at_night = pytest.mark.parametrize(
    "host",
    ["", pytest.param("127.0.0.1", marks=pytest.mark.nightly)],
    ids=["shared-memory", "tcp"],
)


def total(tensors: Iterable[Tensor]) -> str:
    return f"{sum(float(tensor.double().sum()) for tensor in tensors):.6f}"


def test_every_engine_holds_the_bytes_that_were_sent(
    listen: Any, weights: dict[str, Tensor], start_engine: Any
) -> None:
    with listen(weights) as sender:
        engines = [start_engine(sender.address, name=f"rollout-{index}") for index in range(3)]
        proofs = sender.send(weights.items(), 1, 3)
        for engine in engines:
            assert engine.next_text() == f"holds 8 tensors of version 1, sum {total(weights.values())}"
    assert len(sender.plan.buckets) == 5  # so both slots are used more than once
    assert len(proofs) == 3
    assert proofs[0] == proofs[1] == proofs[2]
    assert (proofs[0].version, proofs[0].num_tensors, len(proofs[0].checksums)) == (1, 8, 5)


def test_the_master_weights_are_converted_to_the_engines_dtype(
    listen: Any, weights: dict[str, Tensor], start_engine: Any
) -> None:
    weights = {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}
    with listen(weights, "bfloat16") as sender:
        engine = start_engine(sender.address)
        sender.send(weights.items(), 1, 1)
    expected = total(tensor.bfloat16() for tensor in weights.values())
    assert engine.next_text() == f"holds {len(weights)} tensors of version 1, sum {expected}"


def load(address: str, held: dict[str, Tensor]) -> PeerStream:
    """Take version 1 into tensors that are there."""
    with receive(address, 1, 30) as stream:
        stream.load(held.__getitem__)
        stream.confirm(stream.prove(held.__getitem__))
    return stream


def empty_like(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}


def test_engines_load_into_their_own_tensors_however_these_lie(listen: Any, weights: dict[str, Tensor]) -> None:
    rows, held = empty_like(weights), empty_like(weights)
    held["wide"] = torch.zeros(3, 1000).t()
    with listen(weights) as sender:
        engines = [in_thread(lambda mine=mine: load(sender.address, mine)) for mine in (rows, held)]  # type: ignore[misc]
        proofs = sender.send(weights.items(), 1, 2)
        for thread, _ in engines:
            thread.join()
    assert proofs[0] == proofs[1]
    for name, tensor in weights.items():
        assert torch.equal(held[name], tensor)
        assert torch.equal(rows[name], tensor)


def test_a_stream_that_is_over_holds_nothing_of_the_engines(listen: Any, weights: dict[str, Tensor]) -> None:
    weights = {name: weights[name] for name in ("embed", "wide")}
    memory = {name: mmap.mmap(-1, tensor.nbytes) for name, tensor in weights.items()}
    held = {name: torch.frombuffer(memory[name], dtype=torch.float32).view(weights[name].shape) for name in weights}
    with listen(weights) as sender:
        thread, streams = in_thread(lambda: load(sender.address, held))
        sender.send(weights.items(), 1, 1)
        thread.join()
    assert isinstance(streams[0], PeerStream)
    held.clear()
    for each in memory.values():
        each.close()  # raises BufferError if anybody still looks at it


def test_an_engine_without_room_says_so_before_anything_is_written(listen: Any, weights: dict[str, Tensor]) -> None:
    held = empty_like(weights) | {"head": torch.zeros(3)}
    with listen(weights) as sender:
        thread, results = in_thread(lambda: load(sender.address, held))
        with pytest.raises(WeightSyncError, match=r"^rollout-0 gave up: head: planned with shape \(16, 8\)"):
            sender.send(weights.items(), 1, 1)
        thread.join()
    assert not held["embed"].any()
    assert "head: planned with shape" in str(results[0])


def test_one_sender_sends_version_after_version(listen: Any, weights: dict[str, Tensor]) -> None:
    with listen(weights) as sender:
        for version in range(1, 6):
            weights["wide"].add_(1)
            thread, results = in_thread(lambda version=version: receive_all(sender.address, version))  # type: ignore[misc]
            sender.send(weights.items(), version, 1)
            thread.join()
            held = results[0]
            assert isinstance(held, dict)
            assert all(torch.equal(held[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("fault", "sender_says", "engine_says"),
    [
        ("flip wide", "rollout-0 gave up: the engine holds other bytes than were sent, in bucket 3 of 5", None),
        ("flip head", "other bytes than were sent, in bucket 4 of 5", None),
        ("lose norm", "rollout-0 gave up: norm: was sent, but the engine holds no tensor of that name", None),
        ("reshape wide", "rollout-0 gave up: wide: planned with shape (1000, 3), the engine has (3000,)", None),
        ("widen norm", "rollout-0 gave up: norm: planned as bfloat16, the engine has float64", None),
        ("forget", "rollout-0 gave up: rollout-0 took the weights of version 1 but did not confirm them", None),
        ("refuse wide", "rollout-0 gave up: ValueError: no room for wide", "ValueError: no room for wide"),
    ],
)
def test_an_engine_that_does_not_hold_what_was_sent_fails_both_sides(
    listen: Any, weights: dict[str, Tensor], start_engine: Any, fault: str, sender_says: str, engine_says: str | None
) -> None:
    with listen(weights) as sender:
        engine = start_engine(sender.address, fault)
        with pytest.raises(WeightSyncError) as caught:
            sender.send(weights.items(), 1, 1)
    assert sender_says in str(caught.value)
    text = engine.next_text()
    assert text.startswith(engine_says or "WeightSyncError: ")
    assert text.removeprefix("WeightSyncError: ") in str(caught.value)


def test_a_false_proof_is_found_by_the_sender(listen: Any, weights: dict[str, Tensor]) -> None:
    def lie(address: str) -> None:
        with receive(address, 1, 30) as stream:
            held = {name: tensor.clone() for name, tensor in stream}
            proof = stream.prove(held.__getitem__)
            stream.confirm(type(proof)(version=1, num_tensors=8, checksums=("0" * 16, *proof.checksums[1:])))

    with listen(weights) as sender:
        thread, results = in_thread(lambda: lie(sender.address))
        with pytest.raises(WeightSyncError, match="rollout-0 holds other bytes than were sent, in bucket 0 of 5"):
            sender.send(weights.items(), 1, 1)
        thread.join()
    assert "trainer-0 gave up: rollout-0 holds other bytes" in str(results[0])


def test_one_engine_that_fails_fails_the_sync_for_all(
    listen: Any, weights: dict[str, Tensor], start_engine: Any
) -> None:
    with listen(weights) as sender:
        good, bad = (
            start_engine(sender.address, name="rollout-0"),
            start_engine(sender.address, "flip norm", name="rollout-1"),
        )
        with pytest.raises(WeightSyncError, match="rollout-1 gave up"):
            sender.send(weights.items(), 1, 2)
        assert "WeightSyncError: trainer-0 gave up: rollout-1 gave up" in good.next_text()
        assert "WeightSyncError: the engine holds other bytes" in bad.next_text()
        retry = start_engine(sender.address)  # the sender is as good as new
        sender.send(weights.items(), 1, 1)
        assert retry.next_text().startswith("holds 8 tensors")


@pytest.mark.parametrize("fault", ["die at embed", "die at wide", "die at head"])
def test_an_engine_that_dies_is_named_at_once_on_all_sides(
    listen: Any, weights: dict[str, Tensor], start_engine: Any, fault: str
) -> None:
    with listen(weights) as sender:
        start_engine(sender.address, fault, name="rollout-7")
        other = start_engine(sender.address)
        with pytest.raises(WeightSyncError, match="rollout-7 hung up or died"):
            sender.send(weights.items(), 1, 2)
        assert "trainer-0 gave up: rollout-7 hung up or died" in other.next_text()


@tcp_at_night
def test_an_engine_that_stands_still_is_named_at_the_deadline(
    listen: Any, host: str, weights: dict[str, Tensor], start_engine: Any
) -> None:
    with listen(weights) as sender:
        start_engine(sender.address, "stop at wide", name="rollout-7")
        with pytest.raises(DeadlineError) as caught:
            sender.send(weights.items(), 1, 1, deadline_s=5)
    what = "to prove what it holds" if host else "to load bucket"  # over TCP the kernel takes a few windows for it
    assert f"weight sync of version 1: waited 5 s for rollout-7 {what}" in str(caught.value)


@pytest.mark.parametrize("num_receivers", [1, 2])
def test_an_engine_that_is_given_up_in_the_middle_of_a_sync_is_waited_for_no_longer(
    listen: Any, weights: dict[str, Tensor], start_engine: Any, num_receivers: int
) -> None:
    """As when its machine is gone: nothing is ever heard of it again, not even that its connection has ended."""
    with listen(weights) as sender:
        engine = start_engine(sender.address, "stop at wide")
        for number in range(1, num_receivers):
            start_engine(sender.address, name=f"rollout-{number}")

        with pytest.raises(
            WeightSyncError, match="weight sync of version 1 was withdrawn while it waited for rollout-0"
        ):
            sender.send(weights.items(), 1, num_receivers, deadline_s=60, is_withdrawn=engine.is_stopped)


@tcp_at_night
def test_engines_that_do_not_come_are_counted_at_the_deadline(
    listen: Any, weights: dict[str, Tensor], start_engine: Any
) -> None:
    with listen(weights) as sender:
        engine = start_engine(sender.address)
        with pytest.raises(DeadlineError, match=r"for 1 of 2 receivers to connect \(here: rollout-0\)"):
            sender.send(weights.items(), 1, 2, deadline_s=4)
        assert "WeightSyncError: trainer-0 gave up: weight sync of version 1: waited 4 s" in engine.next_text()


def test_a_later_version_than_is_sent_fails_both_sides(
    listen: Any, weights: dict[str, Tensor], start_engine: Any
) -> None:
    with listen(weights) as sender:
        engine = start_engine(sender.address, version=3)
        with pytest.raises(WeightSyncError, match="rollout-0 asked for version 3; version 2 is being sent"):
            sender.send(weights.items(), 2, 1)
    assert "rollout-0 asked for version 3; version 2 is being sent" in engine.next_text()


def test_an_engine_left_over_from_an_earlier_version_is_sent_away(
    listen: Any, weights: dict[str, Tensor], start_engine: Any
) -> None:
    with listen(weights) as sender:
        late = start_engine(sender.address, version=1, name="late-0")
        sending, results = in_thread(lambda: sender.send(weights.items(), 2, 1))
        assert "version 1 was asked for; trainer-0 sends version 2" in late.next_text()
        punctual = start_engine(sender.address, version=2)
        sending.join()
        assert isinstance(results[0], list)
        assert punctual.next_text().startswith("holds 8 tensors of version 2")


def swap(tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    pairs = list(tensors.items())
    return [pairs[1], pairs[0], *pairs[2:]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: list(tensors.items())[:-1], "head: planned, but the trainer's tensors ended before it"),
        (lambda tensors: [*tensors.items(), ("extra", torch.ones(1))], "extra: names and order must be those of"),
        (
            lambda tensors: [*tensors.items(), ("wide", torch.ones(1))],
            "wide: it was sent already: the name comes twice",
        ),
        (swap, "wide: came where embed was planned; names and order must be those of the plan"),
        (
            lambda tensors: {**tensors, "wide": torch.ones(3, 1000)}.items(),
            r"wide: planned with shape \(1000, 3\), the",
        ),
    ],
)
def test_tensors_that_differ_from_the_plan_fail_both_sides(
    listen: Any,
    weights: dict[str, Tensor],
    change: Callable[[dict[str, Tensor]], Iterable[tuple[str, Tensor]]],
    words: str,
) -> None:
    with listen(weights) as sender:
        thread, results = in_thread(lambda: receive_all(sender.address, 1))
        with pytest.raises(WeightSyncError, match=words):
            sender.send(change(weights), 1, 1)
        thread.join()
    assert isinstance(results[0], WeightSyncError)
    assert "trainer-0 gave up: " in str(results[0])


def test_an_error_of_the_trainer_while_it_gives_tensors_reaches_the_engines(
    listen: Any, weights: dict[str, Tensor]
) -> None:
    def give() -> Iterable[tuple[str, Tensor]]:
        yield "embed", weights["embed"]
        raise RuntimeError("the merge of LoRA failed")

    with listen(weights) as sender:
        thread, results = in_thread(lambda: receive_all(sender.address, 1))
        with pytest.raises(RuntimeError, match="the merge of LoRA failed"):
            sender.send(give(), 1, 1)
        thread.join()
    assert "trainer-0 gave up: RuntimeError: the merge of LoRA failed" in str(results[0])


def test_an_engine_whose_sender_does_not_send_stops_at_its_deadline(listen: Any, weights: dict[str, Tensor]) -> None:
    with (
        listen(weights) as sender,
        pytest.raises(
            DeadlineError, match=r"version 1 at rollout-0: waited 0.2 s for the sender.* \(its (plan|greeting)\)"
        ),
    ):
        receive_all(sender.address, 1, deadline_s=0.2)


def test_a_stream_is_read_once_and_whole_before_it_is_proved(listen: Any, weights: dict[str, Tensor]) -> None:
    def misuse(address: str) -> None:
        with receive(address, 1, 30) as stream:
            with pytest.raises(WeightSyncError, match="read the whole weight stream before"):
                stream.prove(weights.__getitem__)
            list(stream)
            with pytest.raises(WeightSyncError, match="can be read once"):
                list(stream)
            stream.confirm(stream.prove(weights.__getitem__))

    with listen(weights) as sender:
        thread, results = in_thread(lambda: misuse(sender.address))
        sender.send(weights.items(), 1, 1)
        thread.join()
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
    trainer.wait_dead()
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


def test_a_split_tensor_and_a_whole_one_are_equal_at_any_bucket_size(listen: Any, weights: dict[str, Tensor]) -> None:
    for bucket_bytes in (64, 128, 4096, 1 << 20):
        with listen(weights, bucket_bytes=bucket_bytes) as sender:
            thread, results = in_thread(lambda sender=sender: receive_all(sender.address, 1))  # type: ignore[misc]
            sender.send(weights.items(), 1, 1)
            thread.join()
            held = results[0]
            assert isinstance(held, dict)
            assert all(torch.equal(held[name], weights[name]) for name in weights)


def test_only_what_changed_is_sent(listen: Any, weights: dict[str, Tensor]) -> None:
    held = {name: tensor.clone() for name, tensor in weights.items()}

    def take_changes(address: str) -> list[str]:
        specs = describe_tensors(weights.items())
        with receive(address, 1, 30, held=tensor_checksums(specs, held.__getitem__)) as stream:
            names = [name for name, tensor in stream if held[name].copy_(tensor) is not None]
            stream.confirm(stream.prove(held.__getitem__))
        return names

    weights["wide"].add_(1)
    with listen(weights) as sender:
        thread, results = in_thread(lambda: take_changes(sender.address))
        sender.send_changed(weights.items, 1, 1)
        thread.join()
    assert results == [["wide"]]
    assert torch.equal(held["wide"], weights["wide"])


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_syncs_leave_no_files_open(listen: Any, weights: dict[str, Tensor]) -> None:
    gc.collect()
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with listen(weights) as sender:
            thread, _results = in_thread(lambda sender=sender: receive_all(sender.address, 1))  # type: ignore[misc]
            sender.send(weights.items(), 1, 1)
            thread.join()
    assert len(os.listdir("/proc/self/fd")) <= len(before), "fewer: another test's may close at any moment"
