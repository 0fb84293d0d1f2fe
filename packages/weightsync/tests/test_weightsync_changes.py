"""Only what differs is sent, and only if both sides agree on the rest."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat_types import OffbeatError, WeightSyncError
from offbeat_weightsync import BucketPlan, SharedMemorySender, describe_tensors, receive, tensor_checksums


def make_sender(address: str, weights: dict[str, Tensor]) -> SharedMemorySender:
    plan = BucketPlan.build(describe_tensors(weights.items(), "bfloat16"), 4096)
    return SharedMemorySender(address, plan, deadline_s=20)


class Engine:
    """Holds bfloat16 copies, and takes what it is sent in a thread."""

    def __init__(self, sender: SharedMemorySender, weights: dict[str, Tensor]) -> None:
        self._sender = sender
        self.held = {spec.name: weights[spec.name].to(getattr(torch, spec.dtype)) for spec in sender.plan.specs}
        self.received: list[str] = []
        self.error: Exception | None = None

    def take(self, version: int, held: dict[str, str] | None) -> threading.Thread:
        thread = threading.Thread(target=self._take, args=(version, held))
        thread.start()
        return thread

    def checksums(self) -> dict[str, str]:
        return tensor_checksums(self._sender.plan.specs, self.held.__getitem__)

    def _take(self, version: int, held: dict[str, str] | None) -> None:
        try:
            with receive(self._sender.socket_path, version, 20, held=held) as stream:
                self.received = [spec.name for spec in stream.plan.specs]
                stream.load(self.held.__getitem__)
                stream.confirm(stream.prove(self.held.__getitem__))
        except OffbeatError as error:
            self.error = error

    def holds(self, weights: dict[str, Tensor]) -> bool:
        return all(torch.equal(tensor, weights[name].to(tensor.dtype)) for name, tensor in self.held.items())


def test_a_version_without_a_change_still_comes_with_a_proof(address: str, weights: dict[str, Tensor]) -> None:
    with make_sender(address, weights) as sender:
        engine = Engine(sender, weights)
        weights["wide"] = weights["wide"] + 1e-8  # below bfloat16's resolution: nothing to send
        thread = engine.take(1, engine.checksums())
        (proof,) = sender.send_changed(weights.items, 1, 1)
        thread.join()
        assert len(engine.received) == proof.num_tensors == 1
        assert engine.holds(weights)


def test_an_engine_that_lost_a_byte_of_what_did_not_change_gets_it_again(
    address: str, weights: dict[str, Tensor]
) -> None:
    with make_sender(address, weights) as sender:
        engine = Engine(sender, weights)
        engine.held["embed"].view(torch.uint8).view(-1)[3] ^= 1
        thread = engine.take(1, engine.checksums())
        sender.send_changed(weights.items, 1, 1)
        thread.join()
        assert engine.received == ["embed"]
        assert engine.holds(weights)


def test_engines_that_hold_different_things_get_what_either_lacks(address: str, weights: dict[str, Tensor]) -> None:
    with make_sender(address, weights) as sender:
        engines = [Engine(sender, weights) for _ in range(2)]
        engines[0].held["scale"].add_(1)
        engines[1].held["wide"].add_(1)
        threads = [engine.take(1, engine.checksums()) for engine in engines]
        sender.send_changed(weights.items, 1, 2)
        for engine, thread in zip(engines, threads, strict=True):
            thread.join()
            assert engine.received == ["wide", "scale"]
            assert engine.holds(weights)


def test_an_engine_that_does_not_say_what_it_holds_gets_everything(address: str, weights: dict[str, Tensor]) -> None:
    with make_sender(address, weights) as sender:
        engine = Engine(sender, weights)
        thread = engine.take(1, None)
        sender.send_changed(weights.items, 1, 1)
        thread.join()
        assert engine.received == list(weights)


def test_changes_are_refused_by_an_engine_that_holds_something_else(
    address: str, weights: dict[str, Tensor], monkeypatch: Any
) -> None:
    with make_sender(address, weights) as sender:
        engine = Engine(sender, weights)
        said = engine.checksums() | {"norm": "0" * 16}
        # A sender with a fault: it leaves out a tensor that the engine does not hold as it should.
        monkeypatch.setattr(
            "offbeat_weightsync._sender.plan_changes",
            lambda plan, *_: BucketPlan.build([plan.specs[0]], plan.bucket_bytes),
        )
        thread = engine.take(1, said)
        with pytest.raises(WeightSyncError, match="sends changes to other weights than are held here"):
            sender.send_changed(weights.items, 1, 1)
        thread.join()
        assert "sends changes to other weights than are held here; ask for everything" in str(engine.error)


def test_tensors_that_are_not_those_of_the_plan_are_refused(address: str, weights: dict[str, Tensor]) -> None:
    with make_sender(address, weights) as sender:
        for given, words in [
            (dict(list(weights.items())[:-1]), "head: planned, but the trainer's tensors ended before it"),
            (weights | {"extra": torch.ones(1)}, "extra: names and order must be those of the plan"),
            (weights | {"norm": torch.ones(9)}, r"norm: planned with shape \(7,\), the trainer has \(9,\)"),
        ]:
            engine = Engine(sender, weights)
            thread = engine.take(1, engine.checksums())
            with pytest.raises(WeightSyncError, match=words):
                sender.send_changed(given.items, 1, 1)
            thread.join()
            assert isinstance(engine.error, WeightSyncError)
