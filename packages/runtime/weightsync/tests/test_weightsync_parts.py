"""A proof by several processes that each hold parts of the tensors: that of the whole, or an error that names it."""

import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from weightsync_peers import Weights, give, in_thread, load, plan_of, said_by, take

from offbeat_core import DeadlineError, WeightSyncError
from offbeat_weightsync import (
    BucketPlan,
    GroupSender,
    HeldPart,
    PartSum,
    SharedMemorySender,
    WeightGroup,
    describe_tensors,
    new_address,
    new_socket_path,
    receive,
)
from offbeat_weightsync._sums.parts import join_sums, sum_parts
from offbeat_weightsync._tensors import prove_tensors

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Tensor, list[tuple[tuple[int, ...], Tensor]]]:
    """Draw a tensor, cut along every dim at random places; its boxes lie anywhere in memory, in any order."""
    shape = draw(st.lists(st.integers(1, 12), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    whole = bits.view(dtype).view(shape)
    found: list[tuple[tuple[int, ...], Tensor]] = [((), whole)]
    for dim, size in enumerate(shape):
        cuts = draw(st.lists(st.sampled_from([0, 4, 8, size // 2, size]), max_size=2))
        edges = sorted({0, size, *(min(cut, size) for cut in cuts)})
        found = [
            ((*first, start), box.narrow(dim, start, end - start))
            for first, box in found
            for start, end in pairwise(edges)
        ]
    return whole, draw(st.permutations(found))


@given(boxes(), st.sampled_from([64, 128, 4096]))
def test_sums_of_boxes_add_up_to_the_proof_of_the_whole(drawn: tuple[Tensor, list], bucket_bytes: int) -> None:
    whole, found = drawn
    tensors = {"before": torch.arange(5.0), "cut": whole, "after": torch.arange(3).bfloat16()}
    plan = BucketPlan.build(describe_tensors(tensors.items()), bucket_bytes)
    expected = prove_tensors(plan, 3, tensors.__getitem__, checksum="words")
    parts = [HeldPart("cut", first, box) for first, box in found]
    others = [HeldPart(name, (0,), tensors[name]) for name in ("after", "before")]
    sums = [*sum_parts(plan, parts[::2]), *sum_parts(plan, others), *sum_parts(plan, parts[1::2])]
    assert join_sums(plan, 3, sums) == expected
    assert join_sums(plan, 3, [*sums, *sums]) == expected, "what two hold counts once"


def test_long_boxes_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"wide": torch.randn(16, 24)}
    plan = BucketPlan.build(describe_tensors(tensors.items()), 256)
    parts = [HeldPart("wide", (0, start), tensors["wide"][:, start : start + 8]) for start in (0, 8, 16)]
    whole = join_sums(plan, 1, sum_parts(plan, parts))
    monkeypatch.setattr("offbeat_weightsync._sums.words.CHUNK_WORDS", 5)
    assert join_sums(plan, 1, sum_parts(plan, parts)) == whole
    assert whole == prove_tensors(plan, 1, tensors.__getitem__, checksum="words")


def test_a_part_of_whole_words_may_begin_within_one() -> None:
    tensors = {"wide": torch.randn(4, 8).bfloat16()}
    plan = BucketPlan.build(describe_tensors(tensors.items()), 64)
    parts = [
        HeldPart("wide", (0, start), tensors["wide"][:, start : start + size])
        for start, size in ((0, 2), (2, 4), (6, 2))
    ]
    assert join_sums(plan, 1, sum_parts(plan, parts)) == prove_tensors(plan, 1, tensors.__getitem__, checksum="words")


def test_what_no_worker_holds_and_what_two_hold_differently_is_named() -> None:
    whole = torch.randn(4, 6)
    plan = BucketPlan.build(describe_tensors([("wide", whole)]), 64)
    left, right = HeldPart("wide", (0, 0), whole[:, :3]), HeldPart("wide", (0, 3), whole[:, 3:])
    with pytest.raises(WeightSyncError, match="wide: the workers hold 12 of its 24 numbers"):
        join_sums(plan, 1, sum_parts(plan, [left]))
    other = right._replace(held=whole[:, 3:] + 1)
    with pytest.raises(WeightSyncError, match="wide: workers that hold the same part of it hold different numbers"):
        join_sums(plan, 1, sum_parts(plan, [left, right, other]))
    with pytest.raises(
        WeightSyncError, match=r"wide: planned with shape \(4, 6\), a worker holds \(4, 3\) at \(0, 4\)"
    ):
        sum_parts(plan, [right._replace(first=(0, 4))])
    with pytest.raises(WeightSyncError, match="wide: planned as float32, the worker holds bfloat16"):
        sum_parts(plan, [right._replace(held=whole[:, 3:].bfloat16())])


class Workers:
    """Two workers of one engine, each in a thread. The first proves every other row of each tensor, the other the rest.

    Args:
        address: of the sender, or of the sender to each worker.
        faults: of each worker: see `weightsync_peers.load`; "spoil" changes a number that it holds.
    """

    def __init__(self, address: str | Sequence[str], *faults: str) -> None:
        self._addresses = [address] * len(faults) if isinstance(address, str) else address
        self._faults, self._met = faults, threading.Barrier(len(faults), timeout=30)
        self._groups = [WeightGroup("cpu") for _ in faults]
        self._sums: dict[int, list[PartSum]] = {}

    def take(self, version: int) -> list[str]:
        """Receive a version; what each says of it."""
        said = ["" for _ in self._faults]

        def run(rank: int) -> None:
            said[rank] = said_by(lambda: self._take(rank, version))

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(said))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return said

    def _take(self, rank: int, version: int) -> Weights:
        address, group = self._addresses[rank], self._groups[rank]
        worker = rank, [other for other, each in enumerate(self._addresses) if each == address]
        with receive(address, version, 30, name="rollout-0", worker=worker, group=group) as stream:
            held = load(stream, self._faults[rank])
            if self._faults[rank] == "spoil":
                held["wide"][rank, 2] += 1
            self._sums[rank] = stream.sum_parts(self._parts(rank, held))
            self._met.wait()
            stream.confirm(stream.join_sums(part for sums in self._sums.values() for part in sums))
        return held

    def _parts(self, rank: int, held: Weights) -> Iterator[HeldPart]:
        for name, tensor in held.items():
            if not tensor.dim():
                yield HeldPart(name, (), tensor)
            for row in range(rank, len(tensor) if tensor.dim() else 0, 2):
                yield HeldPart(name, (row, *[0] * (tensor.dim() - 1)), tensor[row : row + 1])


@pytest.fixture
def sender(weights: Weights) -> Iterator[GroupSender]:
    """Yield a sender whose group proves as one between devices does."""
    with GroupSender(new_address("127.0.0.1"), plan_of(weights), deadline_s=30) as sender:
        sender._checksum = "words"
        yield sender


def sync(sender: GroupSender, weights: Weights, version: int, workers: Workers) -> list[str]:
    """Return the answers of the trainer and of the workers of its one receiver."""
    with in_thread(lambda: workers.take(version)) as said:
        trainer = said_by(lambda: sender.send(give(weights), version, 1))
    return [trainer, *said[0]]  # type: ignore[misc]


def test_workers_are_one_receiver_and_keep_their_group(sender: GroupSender, weights: Weights) -> None:
    workers = Workers(sender.address, "", "")
    assert sync(sender, weights, 1, workers) == ["has 2", "has 8", "has 8"]
    assert sender._group.place is not None
    group = sender._group.place.group
    weights["wide"].add_(1)
    assert sync(sender, weights, 2, workers) == ["has 2", "has 8", "has 8"]
    assert sender._group.place.group == group


def test_workers_that_take_a_version_from_two_senders_prove_the_whole_engine_to_both(weights: Weights) -> None:
    """As those on the devices of two trainer ranks, each of which sends all tensors to the worker beside it."""
    with open_by_words(weights) as first, open_by_words(weights) as second:
        workers = Workers([first.address, second.address], "", "")
        with in_thread(lambda: workers.take(1)) as said, in_thread(lambda: second.send(give(weights), 1, 1)) as other:
            proofs = first.send(give(weights), 1, 1)
        assert said[0] == ["has 8", "has 8"]
        assert [proofs] == other

        workers = Workers([first.address, second.address], "", "spoil")
        with in_thread(lambda: workers.take(2)) as said, in_thread(lambda: second.send(give(weights), 2, 1)) as other:
            sent = said_by(lambda: first.send(give(weights), 2, 1))
        assert all("holds other bytes than were sent" in str(each) for each in (sent, *other, *said[0]))


def open_by_words(weights: Weights) -> SharedMemorySender:
    """Open a sender that proves as one between processes on a device does."""
    sender = SharedMemorySender(new_socket_path(), plan_of(weights), deadline_s=30)
    sender._checksum = "words"
    return sender


def test_an_engine_beside_the_workers_is_waited_for(sender: GroupSender, weights: Weights) -> None:
    def take_later() -> Weights:
        time.sleep(0.5)  # the workers of the other engine are there first, as a rule
        with receive(sender.address, 1, 30, name="rollout-1", group=WeightGroup("cpu")) as stream:
            return take(stream)

    workers = Workers(sender.address, "", "")
    with in_thread(lambda: workers.take(1)) as said, in_thread(take_later) as other:
        trainer = said_by(lambda: sender.send(give(weights), 1, 2))
    assert (trainer, said[0]) == ("has 3", ["has 8", "has 8"])
    assert isinstance(other[0], dict)


def test_a_number_that_one_worker_holds_otherwise_fails_them_all(sender: GroupSender, weights: Weights) -> None:
    trainer, *workers = sync(sender, weights, 1, Workers(sender.address, "", "spoil"))
    words = "the engine holds other bytes than were sent, in bucket 1 of 5 (wide to wide)"
    assert words in trainer
    assert all(words in said for said in workers)


def test_a_worker_that_fails_is_named_and_the_other_gives_up(sender: GroupSender, weights: Weights) -> None:
    trainer, other, failed = sync(sender, weights, 1, Workers(sender.address, "", "refuse wide"))
    assert failed == "ValueError: no room for wide"
    assert trainer == "WeightSyncError: rollout-0.worker-1 gave up: ValueError: no room for wide"
    assert other == "WeightSyncError: trainer-0 gave up: rollout-0.worker-1 gave up: ValueError: no room for wide"


def test_a_worker_that_does_not_come_is_missed_by_its_name(sender: GroupSender, weights: Weights) -> None:
    def take_alone() -> object:
        with receive(sender.address, 1, 30, name="rollout-0", worker=(1, (0, 1)), group=WeightGroup("cpu")) as stream:
            return load(stream)

    missed = r"rollout-0.worker-0 to connect \(here: rollout-0.worker-1\)"
    with in_thread(take_alone) as said, pytest.raises(DeadlineError, match=missed):
        sender.send(weights.items(), 1, 1, deadline_s=3)
    assert "trainer-0 gave up" in str(said[0])


def test_parts_are_proved_by_sums_of_words_alone(sender: GroupSender, weights: Weights) -> None:
    sender._checksum = "xxh3"
    trainer, *workers = sync(sender, weights, 1, Workers(sender.address, "", ""))
    words = 'parts of tensors are proved by the checksum "words", and the sender has "xxh3"'
    assert all(words in said for said in (trainer, *workers))
