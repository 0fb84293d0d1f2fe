"""The other process of a weight-sync benchmark: an engine that copies on request, and takes version after version."""

import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

from bench.weightsync_floors import (
    DEADLINE_S,
    Weights,
    broadcast_all,
    copy_out,
    receive_all,
    whole,
)
from bench.weightsync_payloads import adapter_tensors

from offbeat_mesh import join_world
from offbeat_weightsync import ArrivingStream, WeightCopy, WeightGroup, receive


class Peer:
    """The other process, and a pipe for its orders."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._commands, theirs = spawn.Pipe()
        self._process = spawn.Process(target=target, args=(theirs, *arguments))
        self._process.start()
        theirs.close()

    def __enter__(self) -> "Peer":
        self._commands.recv()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        self._process.join(60)

    def do_with(self, ours: Callable[[], None]) -> None:
        """Run both sides' parts; return when both are done."""
        self._commands.send("go")
        ours()
        self._commands.recv()


def take(weights: Weights, stream: ArrivingStream) -> None:
    """Load a version into the engine's own tensors, prove it, and confirm."""
    stream.load(weights.tensors.__getitem__)
    stream.confirm(stream.prove(weights.tensors.__getitem__))


def be_shared_memory_engine(commands: Connection, socket_path: str, shared_name: str, size: str, repeats: int) -> None:
    """Copy out of shared memory on request, then take a version."""
    weights = Weights(size)
    shared = SharedMemory(shared_name)
    commands.send("ready")
    for version in range(repeats):
        commands.recv()
        copy_out(weights, whole(shared))
        commands.send("copied")
        with receive(socket_path, version, DEADLINE_S) as stream:
            take(weights, stream)


def be_tcp_engine(commands: Connection, address: str, plain_port: int, size: str, repeats: int) -> None:
    """Receive plain bytes on request, then take a version."""
    weights = Weights(size)
    with socket.create_connection(("127.0.0.1", plain_port)) as plain:
        commands.send("ready")
        for version in range(repeats):
            commands.recv()
            receive_all(plain, weights)
            commands.send("received")
            with receive(address, version, DEADLINE_S) as stream:
                take(weights, stream)


def be_payload_engine(commands: Connection, address: str, size: str, repeats: int, payload: str) -> None:
    """Alternate between taking all weights and taking a payload."""
    weights = Weights(size)
    held = adapter_tensors(size) if payload == "adapter" else weights.tensors
    copy = WeightCopy() if payload == "changes" else None
    commands.send("ready")
    for version in range(repeats):
        with receive(address, 2 * version, DEADLINE_S) as stream:
            take(weights, stream)
        with receive(address, 2 * version + 1, DEADLINE_S, copy=copy) as stream:
            stream.load(held.__getitem__)
            stream.confirm(stream.prove(held.__getitem__))


def be_broadcast_engine(
    commands: Connection, address: str, world: str, plain_port: int, size: str, repeats: int
) -> None:
    """Run the other rank: receive plain bytes on request, then take a version."""
    weights, group = Weights(size), WeightGroup("cpu")
    plain = socket.create_connection(("127.0.0.1", plain_port))
    commands.send("ready")
    with plain, join_world(rank=1, size=2, address=world, device="cpu", deadline_s=DEADLINE_S):
        for version in range(repeats):
            commands.recv()
            receive_all(plain, weights)
            commands.send("received")
            commands.recv()
            broadcast_all(weights)
            commands.send("received")
            with receive(address, version, DEADLINE_S, group=group) as stream:
                take(weights, stream)
