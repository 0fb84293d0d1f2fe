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
        ("auto", Route(senders=[HERE], receivers=[HERE, THERE]), ""),
        ("tcp", Route(senders=[HERE], receivers=[THERE]), ""),
        ("shared-memory", Route(senders=[HERE], receivers=[HERE]), ""),
        ("shared-memory", Route(senders=[HERE], receivers=[HERE, THERE]), "an engine is on b, the trainer on a"),
        ("cuda-ipc", Route(senders=[GPU], receivers=[GPU]), ""),
        ("cuda-ipc", Route(senders=[HERE], receivers=[HERE]), "one and the same CUDA device"),
        ("nccl", Route(senders=[HERE], receivers=[THERE, THERE]), ""),
        ("nccl", Route(senders=[GPU], receivers=[GPU]), "some share theirs"),
        ("disk", Route(senders=[HERE], receivers=[THERE]), ""),
        ("disk", Route(senders=[HERE], receivers=[THERE], sends_changes=True), "leave rollout.full_sync_every at 1"),
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
    route = Route(senders=[gpu(0)], receivers=receivers, **{"loads_on_device": True, **settings})
    assert transport_class("auto").settle("auto", route) == settled


EIGHT = [gpu(index) for index in range(8)]
"""Ranks of a trainer on the GPUs of a node; engines share them."""


@pytest.mark.parametrize(
    ("senders", "receivers", "settings", "ranks"),
    [
        (EIGHT, EIGHT, {"shares_devices": True}, [0, 1, 2, 3, 4, 5, 6, 7]),
        (EIGHT, [gpu(5), gpu(5), gpu(2)], {}, [5, 5, 2]),
        ([gpu(0), gpu(0, "b")], [gpu(0, "b"), gpu(0)], {}, [1, 0]),
        (EIGHT, EIGHT[:4], {"engine_width": 2}, [0, 1, 2, 3]),
        ([Endpoint(node="a", device="cuda:0")], [Endpoint(node="a", device="cuda:0")], {}, [0]),
        (EIGHT[:4], EIGHT, {}, "the one on a, device 4, has none"),
        ([gpu(0)], [gpu(0), gpu(0, "b")], {}, "an engine is on b"),
        ([gpu(0), gpu(1, "b")], [gpu(0), gpu(0, "b")], {}, "the one on b, device 0, has none"),
        (EIGHT, EIGHT[:4], {"engine_width": 2, "loads_on_device": False}, "takes weights in one process"),
        ([gpu(0), gpu(0, "b")], [gpu(0), gpu(0, "b")], {"engine_width": 2}, "one is on several"),
        (EIGHT[:2], [gpu(None)], {}, "the one on a has none"),
    ],
)
def test_each_rank_sends_by_cuda_ipc_to_the_engines_on_its_device(
    senders: list[Endpoint], receivers: list[Endpoint], settings: dict[str, Any], ranks: list[int] | str
) -> None:
    route = Route(senders=senders, receivers=receivers, **{"loads_on_device": True, **settings})
    by_ipc, auto = transport_class("cuda-ipc"), transport_class("auto")
    if isinstance(ranks, str):
        assert ranks in by_ipc.complaint(route)
        assert auto.settle("auto", route) != "cuda-ipc"
        return
    assert (by_ipc.complaint(route), by_ipc.assign(route)) == ("", ranks)
    assert ("from each rank of the trainer" in by_ipc.describe(route)) == (len(set(ranks)) > 1)
    assert auto.settle("auto", route) == "cuda-ipc" or not senders[0].kind
    assert transport_class("shared-memory").assign(route) == [0] * len(receivers)


def test_a_name_without_a_transport_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(BackendError, match=rf"'carrier-pigeon' is not installed .*{', '.join(NAMES)}"):
        open_transport("carrier-pigeon")


class CountingTransport(TcpTransport):
    """A transport as of another package: TCP under a name of its own, which counts the streams that it opens."""

    num_opened = 0

    def open_sender(self, address: str, plan: BucketPlan, *, name: str = "trainer-0") -> WeightSender:
        return CountingSender(address, plan, name=name)

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
