"""Weights from process to process through device memory, proved, and after either side was killed.

On a CPU the same goes through shared host memory.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpu.piece import Figures, Place, main, require
from torch import Tensor

from offbeat_core import DeadlineError, WeightSyncError
from offbeat_weightsync import BucketPlan, SharedMemorySender, describe_tensors, new_socket_path, receive

DEADLINE_S = 60.0
VERSIONS = 4
"""The first syncs of a process load kernels."""
ERRORS = WeightSyncError, DeadlineError


def make_weights(num_tensors: int, rows: int, seed: int, device: str) -> dict[str, Tensor]:
    """Make named bfloat16 matrices, drawn on the device; the last one is longer than a bucket."""
    draw = torch.Generator(device).manual_seed(seed)
    shapes = [(rows, 1024)] * (num_tensors - 1) + [(20 * rows, 1024)]
    how: dict[str, Any] = {"generator": draw, "device": device, "dtype": torch.bfloat16}
    return {f"layer.{i}": torch.randn(shape, **how) for i, shape in enumerate(shapes)}


def total_of(weights: dict[str, Tensor]) -> float:
    """Return a number that changes with the weights."""
    return sum(float(tensor.double().sum()) for tensor in weights.values())


def be_engine(pipe: Connection, address: str, device: str, num_tensors: int, rows: int, dies: bool) -> None:
    """Receive versions into tensors of its own, prove each, send what it holds; or die while loading."""
    held = make_weights(num_tensors, rows, 0, device)
    pipe.send("ready")
    try:
        for version in range(1, VERSIONS + 1):
            with receive(address, version, DEADLINE_S, name="rollout-0") as stream:
                if dies:
                    next(iter(stream))
                    os.kill(os.getpid(), signal.SIGKILL)
                stream.load(held.__getitem__)
                stream.confirm(stream.prove(held.__getitem__))
        pipe.send(total_of(held))
    except ERRORS as error:
        pipe.send(f"{type(error).__name__}: {error}")


def be_trainer_that_dies(pipe: Connection, device: str, slots: str | None, num_tensors: int, rows: int) -> None:
    """Send two tensors, and die while the third is asked for."""
    weights = make_weights(num_tensors, rows, 2, device)
    sender = SharedMemorySender(new_socket_path(), plan_of(weights), deadline_s=DEADLINE_S, device=slots)
    pipe.send(sender.address)

    def give() -> Iterator[tuple[str, Tensor]]:
        for number, pair in enumerate(weights.items()):
            if number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield pair

    sender.send(give(), 1, 1)


def plan_of(weights: dict[str, Tensor]) -> BucketPlan:
    """Plan buckets of the usual size."""
    return BucketPlan.build(describe_tensors(weights.items()))


@contextmanager
def process(place: Place, target: object, *args: object) -> Iterator[Connection]:
    """Start a process and yield the pipe with its messages; the process is gone afterwards.

    In a test it is a fork, which has imported torch already. What a GPU was opened for does not survive that.
    """
    start: Any = multiprocessing.get_context("fork" if place.tiny else "spawn")
    ours, theirs = start.Pipe(duplex=False)
    child = start.Process(target=target, args=(theirs, *args))
    child.start()
    theirs.close()
    try:
        yield ours
    finally:
        child.kill()
        child.join()
        ours.close()


def next_of(pipe: Connection) -> object:
    """Return the next message of a process."""
    require(pipe.poll(2 * DEADLINE_S), "a process sends no message")
    return pipe.recv()


def sync(place: Place, slots: str | None, weights: dict[str, Tensor], rows: int) -> float:
    """Send all versions to a new engine; return the seconds of the fastest."""
    taken_s = []
    with (
        start_sender(weights, slots) as sender,
        process(place, be_engine, *engine_of(sender, place, weights, rows)) as pipe,
    ):
        next_of(pipe)
        for version in range(1, VERSIONS + 1):
            start_s = time.perf_counter()
            sender.send(weights.items(), version, 1)
            taken_s.append(time.perf_counter() - start_s)
        require(next_of(pipe) == total_of(weights), "the engine holds other weights")
    return min(taken_s)


def engine_dies(place: Place, slots: str | None, weights: dict[str, Tensor], rows: int) -> float:
    """Return the seconds until a sender whose engine was killed reports it, by the engine's name."""
    message = ""
    with start_sender(weights, slots) as sender:
        engine = process(place, be_engine, *engine_of(sender, place, weights, rows, dies=True))
        with engine as pipe:
            next_of(pipe)
            start_s = time.perf_counter()
            try:
                sender.send(weights.items(), 1, 1)
            except ERRORS as error:
                message = str(error)
            taken_s = time.perf_counter() - start_s
    require("rollout-0" in message and taken_s < DEADLINE_S / 2, f"after {taken_s:.1f} s: {message!r}")
    return taken_s


def start_sender(weights: dict[str, Tensor], slots: str | None) -> SharedMemorySender:
    """Return a sender that listens at its own address."""
    return SharedMemorySender(new_socket_path(), plan_of(weights), deadline_s=DEADLINE_S, device=slots)


def engine_of(
    sender: SharedMemorySender, place: Place, weights: dict[str, Tensor], rows: int, *, dies: bool = False
) -> tuple[str, str, int, int, bool]:
    """Return the arguments of `be_engine` after its pipe."""
    return sender.address, place.name, len(weights), rows, dies


def sender_dies(place: Place, slots: str | None, num_tensors: int, rows: int) -> float:
    """Return the seconds until a receiver whose sender was killed reports it."""
    held = make_weights(num_tensors, rows, 0, place.name)
    with process(place, be_trainer_that_dies, place.name, slots, num_tensors, rows) as pipe:
        address, start_s = str(next_of(pipe)), time.perf_counter()
        try:
            with receive(address, 1, DEADLINE_S, name="rollout-0") as stream:
                stream.load(held.__getitem__)
        except ERRORS:
            return time.perf_counter() - start_s
    require(False, "the receiver did not notice that its sender was gone")
    return 0.0


def run(place: Place) -> Figures:
    """Run syncs, one whose engine is killed, further ones, and one whose sender is killed."""
    slots = place.name if place.is_accelerator else None
    num_tensors, rows = place.pick(4, 40), place.pick(8, 4096)
    weights = make_weights(num_tensors, rows, 1, place.name)
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    before = place.device.memory().allocated_bytes
    first_s = sync(place, slots, weights, rows)
    held = place.device.memory().allocated_bytes - before
    noticed_s = engine_dies(place, slots, weights, rows)
    held_after_kill = place.device.memory().allocated_bytes - before
    again_s = sync(place, slots, weights, rows)
    return {
        "gib": num_bytes / 2**30,
        "gb_per_s_with_proof": num_bytes / min(first_s, again_s) / 1e9,
        "engine_killed_noticed_s": noticed_s,
        "sender_killed_noticed_s": sender_dies(place, slots, num_tensors, rows),
        "mib_held_after_a_sync": held / 2**20,
        "mib_held_after_a_kill": held_after_kill / 2**20,
    }


if __name__ == "__main__":
    main(run)
