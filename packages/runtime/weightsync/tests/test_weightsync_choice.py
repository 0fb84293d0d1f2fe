"""A transport is chosen by its name, says which route it can go, and may come from another package."""

import threading
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from offbeat_core import BackendError, TensorSpec, _backends
from offbeat_weightsync import (
    BucketPlan,
    Endpoint,
    Route,
    TcpSender,
    WeightSender,
    new_address,
    open_transport,
    transport_class,
)
from offbeat_weightsync._transports.tcp import TcpTransport

NAMES = ("auto", "cuda-ipc", "disk", "nccl", "shared-memory", "tcp")
HERE, THERE = Endpoint(node="a", device="cpu"), Endpoint(node="b", device="cpu")
GPU = Endpoint(node="a", device="auto", index=0)


@pytest.mark.parametrize(
    ("name", "route", "complaint"),
    [
        ("auto", Route(sender=HERE, receivers=[HERE, THERE]), ""),
        ("tcp", Route(sender=HERE, receivers=[THERE]), ""),
        ("shared-memory", Route(sender=HERE, receivers=[HERE]), ""),
        ("shared-memory", Route(sender=HERE, receivers=[HERE, THERE]), "an engine is on b, the trainer on a"),
        ("cuda-ipc", Route(sender=GPU, receivers=[GPU]), ""),
        ("cuda-ipc", Route(sender=HERE, receivers=[HERE]), "one and the same CUDA device"),
        ("nccl", Route(sender=HERE, receivers=[THERE, THERE]), ""),
        ("nccl", Route(sender=GPU, receivers=[GPU]), "some share theirs"),
        ("disk", Route(sender=HERE, receivers=[THERE]), ""),
        ("disk", Route(sender=HERE, receivers=[THERE], sends_changes=True), "leave rollout.full_sync_every at 1"),
    ],
)
def test_a_transport_says_which_route_it_cannot_go(name: str, route: Route, complaint: str) -> None:
    said = transport_class(name).complaint(route)
    assert complaint in said
    assert bool(complaint) == bool(said)


def gpu(index: int | None, node: str = "a") -> Endpoint:
    return Endpoint(node=node, device="auto", index=index, kind="GPU")


@pytest.mark.parametrize(
    ("receivers", "settings", "settled"),
    [
        ([gpu(0)], {}, "cuda-ipc"),
        ([gpu(1), gpu(2)], {}, "nccl"),
        ([gpu(0, "b")], {}, "nccl"),
        ([gpu(1), gpu(1)], {}, "auto"),
        ([gpu(0), gpu(1)], {"shares_devices": True}, "auto"),
        ([gpu(None)], {}, "auto"),
        ([gpu(1)], {"sends_changes": True}, "auto"),
        ([gpu(1)], {"loads_on_device": False}, "auto"),
        ([Endpoint(node="a", device="auto", index=1, kind="XPU")], {}, "auto"),
    ],
)
def test_auto_goes_from_device_to_device_where_it_can(
    receivers: list[Endpoint], settings: dict[str, bool], settled: str
) -> None:
    route = Route(sender=gpu(0), receivers=receivers, **{"loads_on_device": True, **settings})
    assert transport_class("auto").settle("auto", route) == settled


def test_a_name_without_a_transport_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(BackendError, match=rf"'carrier-pigeon' is not installed .*{', '.join(NAMES)}"):
        open_transport("carrier-pigeon")


class CountingTransport(TcpTransport):
    """A transport as of another package: TCP under a name of its own, which counts the streams that it opens."""

    num_opened = 0

    def open_sender(self, address: str, plan: BucketPlan) -> WeightSender:
        return CountingSender(address, plan)

    @classmethod
    def open_stream(cls, *args: Any) -> Any:
        CountingTransport.num_opened += 1
        return super().open_stream(*args)


class CountingSender(TcpSender):
    transport = "counting"


def test_a_transport_of_another_package_needs_a_class_and_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("counting", f"{__name__}:CountingTransport", "offbeat.transport")
    monkeypatch.setattr(_backends, "entry_points", lambda *, group: [point] * (group == "offbeat.transport"))
    trainers, engines = open_transport("counting"), open_transport("counting")
    plan = BucketPlan.build([TensorSpec(name="weight", shape=(3,), dtype="float32")], 4096)
    weight, held = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)

    def pull() -> None:
        engines.get_ready()
        with engines.receive(sender.address, 7, 30, name="rollout-0") as stream:
            stream.load({"weight": held}.__getitem__)
            stream.confirm(stream.prove({"weight": held}.__getitem__))

    with trainers.open_sender(new_address("127.0.0.1"), plan) as sender:
        engine = threading.Thread(target=pull)
        engine.start()
        [proof] = sender.send([("weight", weight)], 7, 1, deadline_s=30)
        engine.join()
    assert (proof.version, held.tolist(), CountingTransport.num_opened) == (7, [1.0, 2.0, 3.0], 1)
