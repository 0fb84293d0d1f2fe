"""What the memory tests run, each in a process of its own that says how many buckets of memory it has taken."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from weightsync_peers import Weights, load_into, plan_of

from offbeat_weightsync import ArrivingStream, new_address, open_sender, read_weights, receive, write_weights

BUCKET_BYTES = 64 << 20  # beside it, what a process first touches of libraries (14 MiB) is little
NUM_BUCKETS = 5
DEADLINE_S = 60.0


def make_tensors() -> Weights:
    """One tensor for each bucket, all of whose memory is there."""
    return {f"t{index}": torch.full((BUCKET_BYTES // 4,), float(index)) for index in range(NUM_BUCKETS)}


def peak_bytes(*, reset: bool = False) -> int:
    """Most memory this process has held since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def say_extra(texts: Connection, body: Callable[[], object]) -> None:
    """Run, and say how many buckets' memory it has taken."""
    before = peak_bytes(reset=True)
    body()
    texts.send(f"{(peak_bytes() - before) / BUCKET_BYTES}")


def be_trainer(texts: Connection, host: str) -> None:
    """Say where it listens, and send."""
    tensors = make_tensors()

    def send() -> None:
        with open_sender(new_address(host), plan_of(tensors, None, BUCKET_BYTES), deadline_s=DEADLINE_S) as sender:
            texts.send(sender.address)
            sender.send(tensors.items(), 1, 1)

    texts.send("ready")
    say_extra(texts, send)


def be_engine(texts: Connection, address: str) -> None:
    """Take what is sent into tensors that are there."""
    _say_extra_of_loading(texts, lambda: receive(address, 1, DEADLINE_S))


def be_writer(texts: Connection, folder: str) -> None:
    """Write a version."""
    tensors = make_tensors()
    texts.send("ready")
    say_extra(texts, lambda: write_weights(folder, plan_of(tensors, None, BUCKET_BYTES), tensors.items(), 1))


def be_reader(texts: Connection, folder: str) -> None:
    """Read it into tensors that are there."""
    _say_extra_of_loading(texts, lambda: read_weights(folder, 1, deadline_s=DEADLINE_S))


def _say_extra_of_loading(texts: Connection, open_stream: Callable[[], AbstractContextManager[ArrivingStream]]) -> None:
    held = {name: tensor.fill_(-1) for name, tensor in make_tensors().items()}

    def take() -> None:
        with open_stream() as stream:
            load_into(stream, held)
        assert [tensor[-1].item() for tensor in held.values()] == list(range(NUM_BUCKETS))

    texts.send("ready")
    say_extra(texts, take)
