"""Weights over a group arrive whole and proved on every rank, or every rank says what went wrong."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from weightsync_memory import peak_bytes
from weightsync_peers import Weights, are_equal, give, load_into, plan_of, said_by, take
from weightsync_ranks import RunRanks

from offbeat_mesh import Group
from offbeat_types import OffbeatError, WeightProof
from offbeat_weightsync import _broadcast, broadcast_weights, receive_broadcast

Proofs = list[WeightProof]


def send(group: Group, weights: Weights, version: int = 1, fault: str = "", deadline_s: float = 20) -> Proofs:
    return broadcast_weights(group, plan_of(weights), give(weights, fault), version, deadline_s=deadline_s)


def receive(group: Group, version: int = 1, fault: str = "", source: int = 0) -> Weights:
    with receive_broadcast(group, version, source=source, deadline_s=20) as stream:
        return take(stream, fault)


def test_every_rank_holds_the_bytes_that_were_sent_version_after_version(weights: Weights, run_ranks: RunRanks) -> None:
    def body(group: Group) -> str:
        for version in (1, 2, 3):
            weights["wide"].add_(version)
            if group.rank == 1:  # a source that is not the first
                send(group, weights, version)
            else:
                assert are_equal(receive(group, version, source=1), weights)
        return "held"

    assert run_ranks(3, body) == ["held"] * 3


@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20], ids=["several buckets", "one"])
def test_weights_are_loaded_in_place_and_converted_on_the_way(
    floats: Weights, run_ranks: RunRanks, bucket_bytes: int
) -> None:
    def body(group: Group) -> str:
        plan = plan_of(floats, "bfloat16", bucket_bytes)
        if group.rank == 0:
            return f"{len(broadcast_weights(group, plan, floats.items(), 7, deadline_s=20))}"
        held = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in plan.specs}
        with receive_broadcast(group, 7, deadline_s=20) as stream:
            load_into(stream, held)
        return str(are_equal(held, {name: tensor.bfloat16() for name, tensor in floats.items()}))

    assert run_ranks(2, body) == ["1", "True"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_early_in_a_long_sync_ends_it_early(weights: Weights, run_ranks: RunRanks, failing: int) -> None:
    many = {f"t{index}": weights["wide"] + index for index in range(200)}
    gathered: list[str] = []

    def give_slowly() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in many.items():
            if failing == 0 and name == "t2":
                raise RuntimeError("no memory left")
            gathered.append(name)
            time.sleep(0.05)  # the kernel takes more than these small tensors, so a failure needs time to be heard
            yield name, tensor

    def body(group: Group) -> str:
        said = "nothing was noticed"
        try:
            if group.rank == 0:
                broadcast_weights(group, plan_of(many), give_slowly(), 1, deadline_s=20)
            else:
                receive(group, fault="refuse t2" if group.rank == failing else "")
        except (OffbeatError, RuntimeError, ValueError) as error:
            said = f"{type(error).__name__}: {error}, {len(gathered)} gathered"
        return f"{said}; then {len(group.all_gather_data(group.rank))} ranks"

    said = run_ranks(3, body)
    reason = "RuntimeError: no memory left" if failing == 0 else "ValueError: no room for t2"
    for rank, text in enumerate(said):
        start = reason if rank == failing else f"WeightSyncError: rank {failing} gave up: {reason}"
        assert text.startswith(start), text
        assert text.endswith("then 3 ranks")
    num_gathered = int(said[0].rpartition(" gathered")[0].rpartition(" ")[2])
    assert num_gathered < 100  # of 200: it did not go on to the end


def test_a_rank_that_wants_another_version_fails_all_ranks(weights: Weights, run_ranks: RunRanks) -> None:
    def body(group: Group) -> str:
        if group.rank == 0:
            return said_by(lambda: send(group, weights, 2))
        return said_by(lambda: receive(group, 2 if group.rank == 1 else 1))

    for said in run_ranks(3, body):
        assert said.startswith("WeightSyncError: policy version and bucket plan must be the same on all members"), said
        assert "rank 0, 1: {'version': 2" in said
        assert "rank 2: {'version': 1" in said


def test_a_sender_that_dies_between_two_buckets_is_named_on_all_ranks(weights: Weights, run_ranks: RunRanks) -> None:
    def body(group: Group) -> str:
        return said_by(lambda: receive(group) if group.rank else send(group, weights, fault="die"))

    begin = time.monotonic()
    dead, *said = run_ranks(3, body)
    assert time.monotonic() - begin < 15  # within seconds: the deadline is 20
    assert dead == ""
    for text in said:
        assert text.startswith("PeerFailedError: rank 0 (dp 0) failed: its process ended"), text


@pytest.mark.nightly
def test_an_engine_that_stands_still_is_named_at_the_deadline(weights: Weights, run_ranks: RunRanks) -> None:
    def body(group: Group) -> str:
        if group.rank == 0:
            return f"{len(send(group, weights, deadline_s=5))} proofs"
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
    weights: Weights, run_ranks: RunRanks, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> Tensor:
        raise MemoryError("no memory left")

    def sync(group: Group, version: int) -> str:
        return said_by(lambda: receive(group, version) if group.rank else send(group, weights, version))

    def body(group: Group) -> str:
        with monkeypatch.context() as broken:
            if group.rank == failing:
                broken.setattr(_broadcast.torch, "empty", no_memory)
            said = sync(group, 1)
        return f"{said}; then {sync(group, 2)}"

    reason = "MemoryError: no memory left"
    for rank, text in enumerate(run_ranks(3, body)):
        heard = f"WeightSyncError: rank {failing} gave up: {reason}"
        assert text.startswith(reason if rank == failing else heard), text
        assert text.endswith("; then has 8" if rank else "; then has 2"), text


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads peak memory from /proc")
def test_the_peak_of_extra_memory_is_two_buckets(run_ranks: RunRanks) -> None:
    bucket_bytes, num_buckets = 24 << 20, 6
    elements = bucket_bytes // 4

    def body(group: Group) -> str:
        names = [f"t{index}" for index in range(num_buckets)]
        shared, held = torch.ones(elements), torch.zeros(num_buckets, elements)
        place = dict(zip(names, held, strict=True))
        plan = plan_of(dict.fromkeys(names, shared), None, bucket_bytes)
        held.fill_(0.5)  # so that its memory is there already
        before = peak_bytes(reset=True)
        if group.rank == 0:
            tensors = ((name, shared.fill_(index)) for index, name in enumerate(names))
            broadcast_weights(group, plan, tensors, 1, deadline_s=20)
        else:
            with receive_broadcast(group, 1, deadline_s=20) as stream:
                load_into(stream, place)
            assert held[:, 0].tolist() == list(range(num_buckets))
        return str((peak_bytes() - before) / bucket_bytes)

    for said in run_ranks(2, body):
        assert float(said) < 2.0, said  # of two buckets at most
