"""Weights over a group arrive whole and proved on every rank, or every rank says what went wrong."""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from weightsync_memory import peak_bytes
from weightsync_peers import load, spoil
from weightsync_ranks import RunRanks

from offbeat_mesh import Group
from offbeat_types import OffbeatError
from offbeat_weightsync import (
    BucketPlan,
    _broadcast,
    broadcast_weights,
    describe_tensors,
    receive_broadcast,
)

BUCKET_BYTES = 4096
Named = Iterable[tuple[str, Tensor]]


def send(group: Group, tensors: Named, version: int, planned: dict[str, Tensor], deadline_s: float = 20) -> str:
    plan = BucketPlan.build(describe_tensors(planned.items()), BUCKET_BYTES)
    proofs = broadcast_weights(group, plan, tensors, version, deadline_s=deadline_s)
    return f"{len(proofs)} proofs of version {version}"


def take(group: Group, version: int, fault: str = "", source: int = 0, deadline_s: float = 20) -> dict[str, Tensor]:
    with receive_broadcast(group, version, source=source, deadline_s=deadline_s) as stream:
        held = load(stream, fault)
        spoil(held, fault)
        if fault != "forget":
            stream.confirm(stream.prove(held.__getitem__))
    return held


def error_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def test_every_rank_holds_the_bytes_that_were_sent_version_after_version(
    weights: dict[str, Tensor], run_ranks: RunRanks
) -> None:
    def body(group: Group) -> str:
        for version in (1, 2, 3):
            weights["wide"].add_(version)
            if group.rank == 1:  # a source that is not the first
                send(group, weights.items(), version, weights)
            else:
                held = take(group, version, source=1)
                assert all(torch.equal(held[name], weights[name]) for name in weights)
        return "held"

    assert run_ranks(3, body) == ["held"] * 3


def test_weights_are_loaded_in_place_and_converted_on_the_way(weights: dict[str, Tensor], run_ranks: RunRanks) -> None:
    floats = {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}

    def body(group: Group) -> str:
        plan = BucketPlan.build(describe_tensors(floats.items(), "bfloat16"), BUCKET_BYTES)
        if group.rank == 0:
            return f"{len(broadcast_weights(group, plan, floats.items(), 7, deadline_s=20))}"
        held = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in plan.specs}
        with receive_broadcast(group, 7, deadline_s=20) as stream:
            stream.load(held.__getitem__)
            stream.confirm(stream.prove(held.__getitem__))
        return str(all(torch.equal(held[name], floats[name].bfloat16()) for name in floats))

    assert run_ranks(2, body) == ["1", "True"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("flip wide", "the engine holds other bytes than were sent, in bucket 3 of 5"),
        ("lose norm", "norm: was sent, but the engine holds no tensor of that name"),
        ("reshape wide", "wide: planned with shape (1000, 3), the engine has (3000,)"),
        ("widen norm", "norm: planned as bfloat16, the engine has float64"),
        ("forget", "rank 1 took the weights of version 1 but did not confirm them"),
        ("refuse wide", "ValueError: no room for wide"),
        ("refuse head", "ValueError: no room for head"),
    ],
)
def test_a_rank_that_does_not_hold_what_was_sent_fails_all_ranks_and_the_next_sync_works(
    weights: dict[str, Tensor], run_ranks: RunRanks, fault: str, words: str
) -> None:
    def body(group: Group) -> str:
        try:
            if group.rank == 0:
                send(group, weights.items(), 1, weights)
            else:
                take(group, 1, fault if group.rank == 1 else "")
            said = "nothing was noticed"
        except (OffbeatError, ValueError) as error:
            said = error_of(error)
        if group.rank == 0:
            return f"{said}; then {send(group, weights.items(), 2, weights)}"
        return f"{said}; then {len(take(group, 2))} tensors"

    sender, bad, good = run_ranks(3, body)
    assert sender.startswith(f"WeightSyncError: rank 1 gave up: {words}")
    assert words.removeprefix("ValueError: ") in bad
    assert good.startswith("WeightSyncError: rank 1 gave up: ")
    assert words in good
    assert sender.endswith("; then 2 proofs of version 2")
    assert bad.endswith("; then 8 tensors")
    assert good.endswith("; then 8 tensors")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_early_in_a_long_sync_ends_it_early(
    weights: dict[str, Tensor], run_ranks: RunRanks, failing: int
) -> None:
    many = {f"t{index}": weights["wide"] + index for index in range(200)}
    gathered: list[str] = []

    def give() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in many.items():
            if failing == 0 and name == "t2":
                raise RuntimeError("no memory left")
            gathered.append(name)
            time.sleep(0.05)  # the kernel takes more than these small tensors, so a failure needs time to be heard
            yield name, tensor

    def body(group: Group) -> str:
        try:
            if group.rank == 0:
                return send(group, give(), 1, many)
            return str(len(take(group, 1, "refuse t2" if group.rank == failing else "")))
        except (OffbeatError, RuntimeError, ValueError) as error:
            return f"{error_of(error)}, {len(gathered)} gathered; then {len(group.all_gather_data(group.rank))} ranks"

    said = run_ranks(3, body)
    reason = "RuntimeError: no memory left" if failing == 0 else "ValueError: no room for t2"
    for rank, text in enumerate(said):
        start = reason if rank == failing else f"WeightSyncError: rank {failing} gave up: {reason}"
        assert text.startswith(start), text
        assert text.endswith("then 3 ranks")
    num_gathered = int(said[0].rpartition(" gathered")[0].rpartition(" ")[2])
    assert num_gathered < 100  # of 200: it did not go on to the end


def test_a_false_proof_is_found_by_every_rank(weights: dict[str, Tensor], run_ranks: RunRanks) -> None:
    def body(group: Group) -> str:
        if group.rank == 0:
            return send(group, weights.items(), 1, weights)
        with receive_broadcast(group, 1, deadline_s=20) as stream:
            proof = stream.prove({name: tensor.clone() for name, tensor in stream}.__getitem__)
            checksums = proof.checksums if group.rank == 1 else ("0" * 16, *proof.checksums[1:])
            stream.confirm(type(proof)(version=1, num_tensors=8, checksums=checksums))
        return "confirmed"

    for said in run_ranks(3, body):
        assert said.startswith("WeightSyncError: rank 2 holds other bytes than were sent, in bucket 0 of 5"), said


def test_a_rank_that_wants_another_version_fails_all_ranks(weights: dict[str, Tensor], run_ranks: RunRanks) -> None:
    def body(group: Group) -> str:
        if group.rank == 0:
            return send(group, weights.items(), 2, weights)
        return str(len(take(group, 2 if group.rank == 1 else 1)))

    for said in run_ranks(3, body):
        assert said.startswith("WeightSyncError: policy version and bucket plan must be the same on all members"), said
        assert "rank 0, 1: {'version': 2" in said
        assert "rank 2: {'version': 1" in said


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("twice", "embed: came where wide was planned; it was sent already: the name comes twice"),
        ("lost", "head: planned, but the trainer's tensors ended before it"),
        ("extra", "embed: it was sent already: the name comes twice"),
        ("shape", "wide: planned with shape (1000, 3), the trainer has (3, 1000)"),
        ("raise", "RuntimeError: the merge of LoRA failed"),
    ],
)
def test_tensors_that_differ_from_the_plan_fail_all_ranks(
    weights: dict[str, Tensor], run_ranks: RunRanks, fault: str, words: str
) -> None:
    def give() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.items():
            if name == "wide" and fault == "raise":
                raise RuntimeError("the merge of LoRA failed")
            if name == "head" and fault == "lost":
                return
            yield name, tensor.t() if name == "wide" and fault == "shape" else tensor
            if name == "embed" and fault == "twice":
                yield name, tensor
        if fault == "extra":
            yield "embed", weights["embed"]

    def body(group: Group) -> str:
        return send(group, give(), 1, weights) if group.rank == 0 else str(len(take(group, 1)))

    said = run_ranks(3, body)
    assert words in f"{said[0]}"
    for text in said[1:]:
        assert text == f"WeightSyncError: rank 0 gave up: {words}"


def test_a_rank_that_dies_between_two_buckets_is_named_on_all_others(
    weights: dict[str, Tensor], run_ranks: RunRanks
) -> None:
    def body(group: Group) -> str:
        if group.rank == 0:
            return send(group, weights.items(), 1, weights)
        return str(len(take(group, 1, "die at wide" if group.rank == 1 else "")))

    begin = time.monotonic()
    sender, dead, other = run_ranks(3, body)
    assert time.monotonic() - begin < 15  # within seconds: the deadline is 20
    assert dead == ""
    for said in (sender, other):
        assert said.startswith("PeerFailedError: rank 1 (dp 1) failed: its process ended"), said


def test_a_sender_that_dies_between_two_buckets_is_named_on_all_ranks(
    weights: dict[str, Tensor], run_ranks: RunRanks
) -> None:
    def give() -> Iterator[tuple[str, Tensor]]:
        yield "embed", weights["embed"]
        yield "wide", weights["wide"]
        os.kill(os.getpid(), signal.SIGKILL)

    def body(group: Group) -> str:
        return send(group, give(), 1, weights) if group.rank == 0 else str(len(take(group, 1)))

    begin = time.monotonic()
    said = run_ranks(3, body)
    assert time.monotonic() - begin < 15
    assert said[0] == ""
    for text in said[1:]:
        assert text.startswith("PeerFailedError: rank 0 (dp 0) failed: its process ended"), text


@pytest.mark.nightly
def test_an_engine_that_stands_still_is_named_at_the_deadline(weights: dict[str, Tensor], run_ranks: RunRanks) -> None:
    def body(group: Group) -> str:
        if group.rank == 0:
            return send(group, weights.items(), 1, weights, deadline_s=5)
        with receive_broadcast(group, 1, deadline_s=5 if group.rank == 2 else 12) as stream:
            held = {}
            for name, tensor in stream:
                held[name] = tensor.clone()
                if group.rank == 1 and name == "embed":
                    time.sleep(8)
            stream.confirm(stream.prove(held.__getitem__))
        return "the sync should have ended"

    sender, _, other = run_ranks(3, body)
    for said in (sender, other):
        assert said.startswith(("DeadlineError", "PeerFailedError", "WeightSyncError: rank 0 gave up")), said
        assert "rank 1" in said or "version 1" in said, said


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_begin_fails_all_ranks_and_the_next_sync_works(
    weights: dict[str, Tensor], run_ranks: RunRanks, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> Tensor:
        raise MemoryError("no memory left")

    def sync(group: Group, version: int) -> str:
        if group.rank == 0:
            return send(group, weights.items(), version, weights)
        return f"{len(take(group, version))} tensors"

    def body(group: Group) -> str:
        with monkeypatch.context() as broken:
            if group.rank == failing:
                broken.setattr(_broadcast.torch, "empty", no_memory)
            try:
                said = sync(group, 1)
            except (OffbeatError, MemoryError) as error:
                said = error_of(error)
        return f"{said}; then {sync(group, 2)}"

    reason = "MemoryError: no memory left"
    for rank, text in enumerate(run_ranks(3, body)):
        heard = f"WeightSyncError: rank {failing} gave up: {reason}"
        assert text.startswith(reason if rank == failing else heard), text
        assert text.endswith("; then 2 proofs of version 2" if rank == 0 else "; then 8 tensors"), text


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads peak memory from /proc")
def test_the_peak_of_extra_memory_is_two_buckets(run_ranks: RunRanks) -> None:
    bucket_bytes, num_buckets = 24 << 20, 6
    elements = bucket_bytes // 4

    def body(group: Group) -> str:
        names = [f"t{index}" for index in range(num_buckets)]
        shared, held = torch.ones(elements), torch.zeros(num_buckets, elements)
        place = dict(zip(names, held, strict=True))
        plan = BucketPlan.build(describe_tensors((name, shared) for name in names), bucket_bytes)
        held.fill_(0.5)  # so that its memory is there already
        before = peak_bytes(reset=True)
        if group.rank == 0:
            tensors = ((name, shared.fill_(index)) for index, name in enumerate(names))
            broadcast_weights(group, plan, tensors, 1, deadline_s=20)
        else:
            with receive_broadcast(group, 1, deadline_s=20) as stream:
                stream.load(place.__getitem__)
                stream.confirm(stream.prove(place.__getitem__))
            assert held[:, 0].tolist() == list(range(num_buckets))
        return str((peak_bytes() - before) / bucket_bytes)

    for said in run_ranks(2, body):
        assert float(said) < 2.0, said  # of two buckets at most


def test_weights_of_one_bucket_arrive(run_ranks: RunRanks) -> None:
    weights = {"only": torch.arange(10.0)}

    def body(group: Group) -> str:
        return send(group, weights.items(), 1, weights) if group.rank == 0 else f"{take(group, 1)['only'].sum():g}"

    assert run_ranks(2, body) == ["1 proofs of version 1", "45"]
