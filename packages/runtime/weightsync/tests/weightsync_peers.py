"""What runs at either end of a sync in a test, in a process or a thread of its own, with a fault on request."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from offbeat_core import OffbeatError, WeightProof, WeightSyncError
from offbeat_weightsync import (
    ArrivingStream,
    BucketPlan,
    GroupSender,
    KeptStream,
    WeightCopy,
    WeightGroup,
    describe_tensors,
    new_address,
    open_sender,
    receive,
)

Weights = dict[str, Tensor]
ERRORS = OffbeatError, ValueError, RuntimeError, MemoryError


Sync = Callable[[str], list[str]]
"""A sync of `weights` from a trainer to two engines by one of the transports.

Given a fault, it says what trainer, the engine with the fault, and the other one say. After it, the next sync works.
"""


def plan_of(weights: Weights, dtype: str | None = None, bucket_bytes: int = 4096) -> BucketPlan:
    return BucketPlan.build(describe_tensors(weights.items(), dtype), bucket_bytes)


def said_by(take_part: Callable[[], object]) -> str:
    """What comes of taking part in a sync, as text."""
    try:
        return f"has {len(take_part())}"  # type: ignore[arg-type]
    except ERRORS as error:
        return f"{type(error).__name__}: {error}"


def give(weights: Weights, fault: str = "") -> Iterator[tuple[str, Tensor]]:
    """The trainer's tensors."""
    pairs = list(weights.items())
    given = {
        "lost": pairs[:-1],
        "extra": [*pairs, ("extra", torch.ones(1))],
        "again": [*pairs, ("wide", torch.ones(1))],
        "twice": [pairs[0], *pairs],
        "swap": [pairs[1], pairs[0], *pairs[2:]],
        "shape": [*(weights | {"wide": torch.ones(3, 1000)}).items()],
    }
    for index, pair in enumerate(given.get(fault, pairs)):
        if index == 2 and fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 1 and fault == "raise":
            raise RuntimeError("the merge of LoRA failed")
        yield pair


def take(stream: ArrivingStream, fault: str = "") -> Weights:
    """The engine's part: load what is sent, prove it and confirm."""
    held = load(stream, fault)
    what, _, name = fault.rpartition(" ")
    if what == "flip":
        held[name].view(torch.uint8).view(-1)[-1] ^= 1
    elif what == "lose":
        del held[name]
    elif what == "reshape":
        held[name] = held[name].reshape(-1)
    elif what == "widen":
        held[name] = held[name].double()
    if fault != "forget":
        proof = stream.prove(held.__getitem__)
        if fault == "lie":
            proof = WeightProof(version=1, num_tensors=8, checksums=("0" * 16, *proof.checksums[1:]))
        stream.confirm(proof)
    return held


def load(stream: ArrivingStream, fault: str = "") -> Weights:
    held: Weights = {}
    for name, tensor in stream:
        if fault == f"die at {name}":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == f"stop at {name}":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == f"refuse {name}":
            raise ValueError(f"no room for {name}")
        held[name] = tensor.clone()
        if fault == "scribble":
            tensor.zero_()
    return held


def load_into(stream: ArrivingStream, held: Weights) -> None:
    """Load into tensors that are there, prove and confirm."""
    stream.load(held.__getitem__)
    stream.confirm(stream.prove(held.__getitem__))


def receive_all(address: str | Path, version: int = 1, deadline_s: float = 30) -> Weights:
    with receive(address, version, deadline_s, group=WeightGroup("cpu")) as stream:
        return take(stream)


def be_engine(texts: Connection, address: str, name: str, version: int, deadline_s: float, fault: str) -> None:
    """Receive one version, and say what became of it."""
    texts.send("ready")
    try:
        with receive(address, version, deadline_s, name=name, group=WeightGroup("cpu")) as stream:
            held = take(stream, fault)
        total = sum(float(tensor.double().sum()) for tensor in held.values())
        texts.send(f"holds {len(held)} tensors of version {version}, sum {total:.6f}")
    except ERRORS as error:
        texts.send(f"{type(error).__name__}: {error}")


def be_member(texts: Connection, address: str, name: str, first: int, dies_in: int) -> None:
    """Receive version after version in one member, again where a sync has failed, and send what is held; or die."""
    group, version = WeightGroup("cpu"), first
    texts.send("ready")
    while True:
        try:
            with receive(address, version, 60.0, name=name, group=group) as stream:
                held = take(stream, "die at wide" if version == dies_in else "")
        except WeightSyncError as error:
            texts.send(str(error))
            continue
        total = sum(float(tensor.double().sum()) for tensor in held.values())
        texts.send(f"version {version}: {len(held)} tensors, sum {total:.6f}")
        version += 1


def be_keeping_engine(texts: Connection, address: str, name: str, fault: str, version: int = 0) -> None:
    """Receive a version, and then what has changed in the next, and say what became of that."""
    copy = WeightCopy()
    texts.send("ready")
    try:
        with receive(address, version, 30.0, name=name, copy=copy) as stream:
            take(stream)
        with receive(address, version + 1, 30.0, name=name, copy=copy) as stream:
            held = take(stream, fault)
            how = "changes" if isinstance(stream, KeptStream) and stream.brings_changes else "all"
        total = sum(float(tensor.double().sum()) for tensor in held.values())
        texts.send(f"holds {len(held)} tensors, sent as {how}, sum {total:.6f}")
    except ERRORS as error:
        texts.send(f"{type(error).__name__}: {error}")


def be_trainer_that_dies(texts: Connection, host: str) -> None:
    """Say where it listens, send two tensors, and die while the third is asked for."""
    tensors = {name: torch.ones(5000) for name in "abc"}
    sender = open_sender(new_address(host), plan_of(tensors), deadline_s=30)
    texts.send("ready")
    texts.send(sender.address)
    sender.send(give(tensors, "die"), 1, 1)


def be_group_trainer_that_dies(texts: Connection) -> None:
    """The same over a group."""
    tensors = {name: torch.ones(5000) for name in "abc"}
    sender = GroupSender(new_address("127.0.0.1"), plan_of(tensors), deadline_s=30)
    texts.send("ready")
    texts.send(sender.address)
    sender.send(give(tensors, "die"), 1, 2)


@contextmanager
def in_thread(function: Callable[[], object]) -> Iterator[list[object]]:
    """Run beside the block, which ends with it; the list gets the result or the error."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(function())
        except OffbeatError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield results
    finally:
        thread.join()


@contextmanager
def receiving(address: str | Path, version: int = 1, deadline_s: float = 30) -> Iterator[list[object]]:
    """An engine that takes a version beside the block."""
    with in_thread(lambda: receive_all(address, version, deadline_s)) as results:
        yield results


def are_equal(held: object, weights: Weights) -> bool:
    """Return whether an engine holds these weights, to the bit."""
    assert isinstance(held, dict), held
    return list(held) == list(weights) and all(torch.equal(held[name], weights[name]) for name in weights)
