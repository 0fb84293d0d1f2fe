"""Changed elements alone: sent without loss, applied to the same weights only, and proved as all weights are."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from weightsync_peers import Weights, are_equal, in_thread, load, plan_of

from offbeat_core import WeightProof, WeightSyncError
from offbeat_weightsync import WeightCopy, WeightSender, new_address, open_sender, receive
from offbeat_weightsync._changes import decode_run, encode_run


@st.composite
def versions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Bits of a run before and after."""
    draws = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = np.dtype(draw(st.sampled_from(["u1", "u2", "u4", "u8"])))
    old = draws.integers(0, 2 ** min(8 * dtype.itemsize, 62), draw(st.integers(1, 3000)), dtype=np.uint64).astype(dtype)
    changed = draws.random(len(old)) < draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.3, 0.9, 1.0]))
    return old, np.where(changed, old ^ dtype.type(1), old)


def there_and_back(old: np.ndarray, new: np.ndarray) -> tuple[str, int]:
    """How it was coded, and in how many bytes, that the one became the other."""
    coded, held = encode_run(old, new), old.copy()
    rest = b"the next run"
    assert decode_run(held, coded.coding, coded.num_changed, memoryview(coded.data + rest)) == len(coded.data)
    np.testing.assert_array_equal(held, new)
    return coded.coding, len(coded.data)


@given(versions())
def test_what_is_sent_turns_the_one_into_the_other_and_takes_no_more_bytes(pair: tuple[np.ndarray, np.ndarray]) -> None:
    _, num_bytes = there_and_back(*pair)
    assert num_bytes <= pair[1].nbytes


def changed_at(places: Any, size: int = 200_000) -> tuple[np.ndarray, np.ndarray]:
    old = np.zeros(size, np.uint16)
    new = old.copy()
    new[places] = 1
    return old, new


@pytest.mark.parametrize(
    ("places", "coding", "num_bytes"),
    [
        ([], "same", 0),
        ([0, 5], "gaps", 8),
        ([65_535], "gaps", 4),  # as many before it as 16 bit can say
        ([65_536], "gaps", 8),  # one more: an element between is sent although it has not changed
        ([199_999], "gaps", 16),
        (slice(0, None, 10), "mask", 25_000 + 40_000),
        (slice(None), "all", 400_000),
    ],
)
def test_the_shortest_coding_is_taken(places: Any, coding: str, num_bytes: int) -> None:
    assert there_and_back(*changed_at(places)) == (coding, num_bytes)


@pytest.mark.parametrize(
    ("coding", "num_changed", "data"),
    [
        ("gaps", 1, b"\xff\xff\0\0"),  # outside
        ("gaps", 2, b"\0\0\0\0"),  # too short
        ("mask", 1, b"\xc0" + bytes(3)),  # two bits
        ("all", 3, bytes(6)),
        ("all", 9, bytes(18)),
        ("same", 1, bytes(2)),
        ("other", 1, bytes(2)),
    ],
)
def test_what_cannot_be_is_refused(coding: Any, num_changed: int, data: bytes) -> None:
    with pytest.raises(WeightSyncError, match="came"):
        decode_run(np.zeros(8, np.uint16), coding, num_changed, memoryview(data))


class Engine:
    """Keeps a copy of what came last."""

    def __init__(self, sender: WeightSender) -> None:
        self.address, self.copy = sender.address, WeightCopy()
        self.held: Weights = {}

    def take(self, version: int) -> bool:
        """Return whether changes alone have come."""
        with receive(self.address, version, 20, copy=self.copy) as stream:
            self.held = load(stream)
            stream.confirm(stream.prove(self.held.__getitem__))
            return bool(stream.brings_changes)  # type: ignore[union-attr]


class Trainer:
    """Sends version after version, and counts what its connections take."""

    def __init__(self, sender: WeightSender, max_changes: int) -> None:
        self._sender, self._copy, self.version = sender, WeightCopy(max_changes), 0

    def send(self, weights: Weights, *engines: Engine) -> list[object]:
        """Return whether each engine was sent changes alone, or its error."""
        self.version += 1
        version = self.version
        threads = [in_thread(lambda one=one: one.take(version)) for one in engines]
        results = [thread.__enter__() for thread in threads]
        try:
            self._sender.send(weights.items(), version, len(engines), copy=self._copy)
        finally:
            for thread in threads:
                thread.__exit__(None, None, None)
        return [each[0] for each in results]


def change(weights: Weights, seed: int) -> None:
    """Another version: a few elements, one tensor wholly, most not at all."""
    draw = torch.Generator().manual_seed(seed)
    weights["wide"].view(-1)[torch.randperm(3000, generator=draw)[:40]] += 0.5
    weights["norm"].add_(1)


def expected(weights: Weights, sender: WeightSender) -> Weights:
    return {spec.name: weights[spec.name].to(getattr(torch, spec.dtype)) for spec in sender.plan.specs}


@pytest.fixture
def rounded(listen: Callable[..., WeightSender], weights: Weights) -> Iterator[WeightSender]:
    with listen(weights, "bfloat16") as sender:
        yield sender


def test_versions_that_arrive_as_changes_are_whole(rounded: WeightSender, weights: Weights) -> None:
    trainer, engines = Trainer(rounded, max_changes=9), [Engine(rounded), Engine(rounded)]
    for version in range(4):
        change(weights, version)
        assert trainer.send(weights, *engines) == [version > 0] * 2
        assert all(are_equal(engine.held, expected(weights, rounded)) for engine in engines)


def test_all_weights_travel_every_so_many_versions(rounded: WeightSender, weights: Weights) -> None:
    trainer, engine = Trainer(rounded, max_changes=2), Engine(rounded)
    were_changes = []
    for version in range(7):
        change(weights, version)
        were_changes += trainer.send(weights, engine)
    assert were_changes == [False, True, True, False, True, True, False]
    assert are_equal(engine.held, expected(weights, rounded))


def test_an_engine_that_holds_something_else_makes_all_weights_travel(rounded: WeightSender, weights: Weights) -> None:
    trainer, first = Trainer(rounded, max_changes=9), Engine(rounded)
    trainer.send(weights, first)
    change(weights, 1)
    assert trainer.send(weights, first, late := Engine(rounded)) == [False, False]
    change(weights, 2)
    assert trainer.send(weights, first, late) == [True, True]
    again = Trainer(rounded, max_changes=9)  # the trainer was started again
    again.version = trainer.version
    change(weights, 3)
    assert again.send(weights, first, late) == [False, False]
    change(weights, 4)
    assert again.send(weights, first, late) == [True, True]
    assert are_equal(late.held, expected(weights, rounded))


def test_weights_of_another_plan_travel_whole(rounded: WeightSender, weights: Weights) -> None:
    """Such as those of an adapter between two versions of all weights: changes to other tensors mean nothing."""
    engine, copy = Engine(rounded), WeightCopy(max_changes=9)
    part = {name: weights[name] for name in ("embed", "norm")}
    for version, (sent, plan) in enumerate(((weights, rounded.plan), (part, plan_of(part, "bfloat16")), (part, None))):
        with in_thread(partial(engine.take, version)) as took_changes:
            rounded.send(sent.items(), version, 1, plan=plan or plan_of(part, "bfloat16"), copy=copy)
        assert took_changes == [plan is None], "changes alone where the same plan came last"
        assert list(engine.held) == list(sent)
    assert torch.equal(engine.held["norm"], part["norm"])


def test_after_a_failure_all_weights_travel(rounded: WeightSender, weights: Weights) -> None:
    trainer, engine = Trainer(rounded, max_changes=9), Engine(rounded)
    trainer.send(weights, engine)
    change(weights, 1)
    del engine.copy._held["norm"]  # it has lost a tensor
    with pytest.raises(WeightSyncError, match="gave up"):
        trainer.send(weights, engine)
    engine.copy = WeightCopy()
    assert trainer.send(weights, engine) == [False]
    change(weights, 2)
    assert trainer.send(weights, engine) == [True]
    assert are_equal(engine.held, expected(weights, rounded))


def test_a_copy_that_has_lost_a_bit_is_found_out(rounded: WeightSender, weights: Weights) -> None:
    trainer, engine = Trainer(rounded, max_changes=9), Engine(rounded)
    trainer.send(weights, engine)
    engine.copy._held["wide"][100] ^= 1
    change(weights, 1)
    with pytest.raises(WeightSyncError, match="holds other bytes than were sent"):
        trainer.send(weights, engine)
    assert trainer.send(weights, engine) == [False]
    assert are_equal(engine.held, expected(weights, rounded))


def test_an_engine_without_a_copy_gets_all_weights(rounded: WeightSender, weights: Weights) -> None:
    copy = WeightCopy(9)
    for version in (1, 2):

        def take(version: int = version) -> dict[str, Tensor]:
            with receive(rounded.address, version, 20) as stream:
                held = load(stream)
                stream.confirm(stream.prove(held.__getitem__))
            return held

        with in_thread(take) as held:
            proofs = rounded.send(weights.items(), version, 1, copy=copy)
        assert are_equal(held[0], expected(weights, rounded))
        assert isinstance(proofs[0], WeightProof)


def test_changes_are_sent_in_few_bytes(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    from offbeat_weightsync._connection import Connection

    large = {"table": torch.zeros(1 << 20, dtype=torch.bfloat16)}
    sent, send_plain = [0], Connection.send_plain

    def count(self: Connection, data: memoryview, *, more: bool = False) -> None:
        sent[0] += len(data)
        send_plain(self, data, more=more)

    monkeypatch.setattr(Connection, "send_plain", count)
    with open_sender(new_address("127.0.0.1"), plan_of(large, None, 1 << 20), deadline_s=30) as sender:
        trainer, engine = Trainer(sender, max_changes=9), Engine(sender)
        trainer.send(large, engine)
        whole, sent[0] = sent[0], 0
        large["table"][::100] = 1.0
        trainer.send(large, engine)
    assert whole > 2 << 20
    assert sent[0] < 0.025 * whole
