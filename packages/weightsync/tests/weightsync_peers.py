"""What runs in the other process of a test: an engine that receives, with a fault on request, or a trainer."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from offbeat_types import OffbeatError
from offbeat_weightsync import BucketPlan, PeerStream, describe_tensors, new_address, open_sender, receive


def be_engine(texts: Connection, address: str, name: str, version: int, deadline_s: float, fault: str) -> None:
    """Receive one version, and say what became of it."""
    texts.send("ready")
    try:
        held = take(address, name, version, deadline_s, fault)
        total = sum(float(tensor.double().sum()) for tensor in held.values())
        texts.send(f"holds {len(held)} tensors of version {version}, sum {total:.6f}")
    except (OffbeatError, ValueError) as error:
        texts.send(f"{type(error).__name__}: {error}")


def take(address: str, name: str, version: int, deadline_s: float, fault: str) -> dict[str, Tensor]:
    with receive(address, version, deadline_s, name=name) as stream:
        held = load(stream, fault)
        spoil(held, fault)
        if fault != "forget":
            stream.confirm(stream.prove(held.__getitem__))
    return held


def load(stream: PeerStream, fault: str) -> dict[str, Tensor]:
    held: dict[str, Tensor] = {}
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


def spoil(held: dict[str, Tensor], fault: str) -> None:
    what, _, name = fault.rpartition(" ")
    if what == "flip":
        held[name].view(torch.uint8).view(-1)[-1] ^= 1
    elif what == "lose":
        del held[name]
    elif what == "reshape":
        held[name] = held[name].reshape(-1)
    elif what == "widen":
        held[name] = held[name].double()


def be_trainer_that_dies(texts: Connection, host: str) -> None:
    """Say where it listens, send one tensor, and die while the second is asked for."""
    tensors = {"a": torch.ones(5000), "b": torch.ones(5000)}
    sender = open_sender(new_address(host), BucketPlan.build(describe_tensors(tensors.items()), 4096), deadline_s=30)
    texts.send("ready")
    texts.send(sender.address)

    def give() -> Iterator[tuple[str, Tensor]]:
        yield "a", tensors["a"]
        os.kill(os.getpid(), signal.SIGKILL)

    sender.send(give(), 1, 1)


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run in a thread; the list gets the result or the error."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(function())
        except OffbeatError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def receive_all(address: str | Path, version: int = 1, deadline_s: float = 30) -> dict[str, Tensor]:
    """Take a version, prove it and confirm."""
    with receive(address, version, deadline_s) as stream:
        held = {name: tensor.clone() for name, tensor in stream}
        stream.confirm(stream.prove(held.__getitem__))
    return held
