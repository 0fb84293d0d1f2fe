"""What the memory tests run, each in a process of its own that says how many buckets of memory it has taken."""

from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from offbeat_weightsync import (
    ArrivingStream,
    BucketPlan,
    describe_tensors,
    new_address,
    open_sender,
    read_weights,
    receive,
    write_weights,
)

BUCKET_BYTES = 64 << 20  # beside it, what a process first touches of libraries (14 MiB) is little
NUM_BUCKETS = 5
DEADLINE_S = 60.0


def make_tensors() -> dict[str, Tensor]:
    """One tensor for each bucket, all of whose memory is there."""
    return {f"t{index}": torch.full((BUCKET_BYTES // 4,), float(index)) for index in range(NUM_BUCKETS)}


def peak_bytes(*, reset: bool = False) -> int:
    """Most memory this process has held since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def say_extra(texts: Connection, body: Callable[[], None]) -> None:
    """Run, and say how many buckets' memory it has taken."""
    before = peak_bytes(reset=True)
    body()
    texts.send(f"{(peak_bytes() - before) / BUCKET_BYTES}")


def be_trainer(texts: Connection, host: str) -> None:
    """Say where it listens, and send."""
    tensors = make_tensors()
    plan = BucketPlan.build(describe_tensors(tensors.items()), BUCKET_BYTES)

    def send() -> None:
        with open_sender(new_address(host), plan, deadline_s=DEADLINE_S) as sender:
            texts.send(sender.address)
            sender.send(tensors.items(), 1, 1)

    texts.send("ready")
    say_extra(texts, send)


def be_engine(texts: Connection, address: str) -> None:
    """Take what is sent into tensors that are there."""
    held = make_tensors()

    def take() -> None:
        with receive(address, 1, DEADLINE_S) as stream:
            _load(stream, held)

    texts.send("ready")
    say_extra(texts, take)


def be_writer(texts: Connection, folder: str) -> None:
    """Write a version."""
    tensors = make_tensors()
    plan = BucketPlan.build(describe_tensors(tensors.items()), BUCKET_BYTES)
    texts.send("ready")
    say_extra(texts, lambda: write_weights(folder, plan, tensors.items(), 1) and None)


def be_reader(texts: Connection, folder: str) -> None:
    """Read it into tensors that are there."""
    held = make_tensors()

    def take() -> None:
        with read_weights(folder, 1, deadline_s=DEADLINE_S) as stream:
            _load(stream, held)

    texts.send("ready")
    say_extra(texts, take)


def _load(stream: ArrivingStream, held: dict[str, Tensor]) -> None:
    for tensor in held.values():
        tensor.fill_(-1)
    stream.load(held.__getitem__)
    stream.confirm(stream.prove(held.__getitem__))  # type: ignore[attr-defined]
    assert [tensor[-1].item() for tensor in held.values()] == list(range(NUM_BUCKETS))
