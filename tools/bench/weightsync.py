"""Speed of weight sync by each transport, proof included, beside the floor that it stands on, in the same run.

    python tools/bench/weightsync.py [--size tiny|smollm2-135m|1b|all] [--transport NAME ...] [--repeats N] [--json]

The trainer's tensors are bfloat16; the engine loads each into its own, proves all of them, and confirms. A time is that
of the whole sync, from the call to the last proof; trainer and engine are two processes. Floors:

    memcpy     one copy of as many bytes in one thread: nothing that fills another process's own memory does less
    two-copy   two processes copy as many bytes each, at the same time and without a word: one into shared memory of two
               buckets, the other out of it. Between processes that keep their own tensors nothing does less
    loopback   a plain TCP connection on 127.0.0.1, one process sends and another receives as many bytes
    write      a plain file of as many bytes, written and fsynced, on the same disk
    read       the same file, read after its pages were dropped from the cache

Floor and sync take turns; the ratio is that of the fastest of each, and of the medians.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import torch

from offbeat_dist import Mesh, join_world
from offbeat_weightsync import (
    DEFAULT_BUCKET_BYTES,
    ArrivingStream,
    BucketPlan,
    SharedMemorySender,
    broadcast_weights,
    describe_tensors,
    new_socket_path,
    read_weights,
    receive,
    receive_broadcast,
    write_weights,
)

Shapes = list[tuple[str, tuple[int, ...]]]
CHUNK_BYTES = 8 << 20
DEADLINE_S = 300.0

SIZES = {
    "tiny": {"vocabulary": 512, "hidden": 64, "key_value": 32, "feed_forward": 128, "layers": 2},
    "smollm2-135m": {"vocabulary": 49152, "hidden": 576, "key_value": 192, "feed_forward": 1536, "layers": 30},
    "1b": {"vocabulary": 128256, "hidden": 2048, "key_value": 512, "feed_forward": 8192, "layers": 16},
}


def llama_shapes(size: dict[str, int]) -> Shapes:
    """Names and shapes of a Llama with tied embeddings."""
    hidden, wide, narrow = size["hidden"], size["feed_forward"], size["key_value"]
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: Shapes = [("model.embed_tokens.weight", (size["vocabulary"], hidden))]
    for index in range(size["layers"]):
        shapes += [(f"model.layers.{index}.{name}.weight", shape) for name, shape in layer.items()]
    return [*shapes, ("model.norm.weight", (hidden,))]


@dataclass
class Times:
    """Seconds of each repeat, by what was measured: "sync" and floors."""

    num_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, what: str, function: Callable[[], object]) -> None:
        """Run once."""
        start = time.perf_counter()
        function()
        self.seconds.setdefault(what, []).append(time.perf_counter() - start)


@dataclass(frozen=True)
class Result:
    """One transport at one size. Ratios are floor / sync; the first, cold repeat does not count."""

    size: str
    transport: str
    num_bytes: int
    sync_s: float
    sync_gb_per_s: float
    floor: str
    floor_gb_per_s: float
    ratio_of_fastest: float
    ratio_of_medians: float
    all_sync_s: list[float]


def results_of(size: str, transport: str, times: Times) -> Iterator[Result]:
    """One result for each floor."""
    sync = times.seconds["sync"][1:] or times.seconds["sync"]
    for floor, seconds in times.seconds.items():
        if floor == "sync":
            continue
        warm = seconds[1:] or seconds
        yield Result(
            size=size,
            transport=transport,
            num_bytes=times.num_bytes,
            sync_s=round(min(sync), 4),
            sync_gb_per_s=round(times.num_bytes / min(sync) / 1e9, 2),
            floor=floor,
            floor_gb_per_s=round(times.num_bytes / min(warm) / 1e9, 2),
            ratio_of_fastest=round(min(warm) / min(sync), 2),
            ratio_of_medians=round(statistics.median(warm) / statistics.median(sync), 2),
            all_sync_s=[round(each, 4) for each in times.seconds["sync"]],
        )


class Weights:
    """The trainer's tensors, or an engine's, and memory to measure a plain copy with."""

    def __init__(self, size: str) -> None:
        torch.set_num_threads(1)
        shapes = llama_shapes(SIZES[size])
        self.tensors = {name: torch.full(shape, 0.5, dtype=torch.bfloat16) for name, shape in shapes}
        self.plan = BucketPlan.build(describe_tensors(self.tensors.items()))
        whole_chunks = -(-self.plan.num_bytes // CHUNK_BYTES) * CHUNK_BYTES
        self._source = np.ones(min(whole_chunks, 1 << 28), dtype=np.uint8)
        self._target = np.zeros_like(self._source)

    def copy(self) -> None:
        """As many bytes as the tensors have, within 2 × 256 MiB."""
        left = self.plan.num_bytes
        while left > 0:
            length = min(left, len(self._source))
            np.copyto(self._target[:length], self._source[:length])
            left -= length

    def copy_in(self, shared: memoryview) -> None:
        """As many bytes as the tensors have, into two buckets of shared memory, over and over."""
        for start, length in self._parts(len(shared)):
            first = start % len(shared)
            own = start % len(self._source)
            np.copyto(np.frombuffer(shared[first : first + length], np.uint8), self._source[own : own + length])

    def copy_out(self, shared: memoryview) -> None:
        """As many bytes out of it, into memory of our own."""
        for start, length in self._parts(len(shared)):
            first, own = start % len(shared), start % len(self._target)
            np.copyto(self._target[own : own + length], np.frombuffer(shared[first : first + length], np.uint8))

    def _parts(self, shared_bytes: int) -> Iterator[tuple[int, int]]:
        assert len(self._target) % CHUNK_BYTES == shared_bytes % CHUNK_BYTES == 0
        for start in range(0, self.plan.num_bytes, CHUNK_BYTES):
            yield start, min(CHUNK_BYTES, self.plan.num_bytes - start)

    def chunks(self) -> Iterator[memoryview]:
        """As many bytes as the tensors have, in pieces."""
        for start in range(0, self.plan.num_bytes, CHUNK_BYTES):
            first = start % len(self._target)
            yield self._target.data[first : first + min(CHUNK_BYTES, self.plan.num_bytes - start)]

    def take(self, stream: ArrivingStream) -> None:
        """Be the engine."""
        stream.load(self.tensors.__getitem__)
        stream.confirm(stream.prove(self.tensors.__getitem__))  # type: ignore[attr-defined]


def time_shared_memory(size: str, repeats: int) -> Times:
    """Two processes of one host."""
    weights = Weights(size)
    times = Times(weights.plan.num_bytes)
    with (
        SharedMemorySender(new_socket_path(), weights.plan, deadline_s=DEADLINE_S) as sender,
        SharedBuckets() as shared,
        Peer(be_shared_memory_engine, sender.socket_path, shared.name, size, repeats) as peer,
    ):
        for version in range(repeats):
            times.measure("memcpy", weights.copy)
            times.measure("two-copy", lambda: peer.do_with(lambda: weights.copy_in(shared.bytes)))
            times.measure("sync", partial(sender.send, weights.tensors.items(), version, 1))
    return times


def be_shared_memory_engine(commands: Connection, socket_path: str, shared_name: str, size: str, repeats: int) -> None:
    """The other process: copy when told to, then take a version."""
    weights = Weights(size)
    shared = SharedMemory(shared_name)
    commands.send("ready")
    for version in range(repeats):
        commands.recv()
        weights.copy_out(whole(shared))
        commands.send("copied")
        with receive(socket_path, version, DEADLINE_S) as stream:
            weights.take(stream)


def time_broadcast(size: str, repeats: int) -> Times:
    """Two ranks over gloo."""
    weights = Weights(size)
    times = Times(weights.plan.num_bytes)
    with socket.create_server(("127.0.0.1", 0)) as listener, FreePort() as port:
        address = f"127.0.0.1:{port}"
        with Peer(be_broadcast_engine, address, listener.getsockname()[1], size, repeats) as peer:
            plain, _ = listener.accept()
            with plain, join_world(rank=0, size=2, address=address, device="cpu", deadline_s=DEADLINE_S):
                group = Mesh(dp=2).group("dp", channel="weights")
                for version in range(repeats):
                    times.measure("loopback", lambda: peer.do_with(lambda: send_all(plain, weights)))
                    times.measure(
                        "sync",
                        partial(
                            broadcast_weights,
                            group,
                            weights.plan,
                            weights.tensors.items(),
                            version,
                            deadline_s=DEADLINE_S,
                        ),
                    )
    return times


def be_broadcast_engine(commands: Connection, address: str, plain_port: int, size: str, repeats: int) -> None:
    """The other rank: receive plain bytes when told to, then take a version."""
    weights = Weights(size)
    plain = socket.create_connection(("127.0.0.1", plain_port))
    commands.send("ready")
    with plain, join_world(rank=1, size=2, address=address, device="cpu", deadline_s=DEADLINE_S):
        group = Mesh(dp=2).group("dp", channel="weights")
        for version in range(repeats):
            commands.recv()
            receive_all(plain, weights)
            commands.send("received")
            with receive_broadcast(group, version, deadline_s=DEADLINE_S) as stream:
                weights.take(stream)


def send_all(plain: socket.socket, weights: Weights) -> None:
    """The loopback's own rate, sending side."""
    for chunk in weights.chunks():
        plain.sendall(chunk)


def receive_all(plain: socket.socket, weights: Weights) -> None:
    """The loopback's own rate, receiving side."""
    for chunk in weights.chunks():
        done = 0
        while done < len(chunk):
            done += plain.recv_into(chunk[done:])


def whole(shared: SharedMemory) -> memoryview:
    """The bytes of shared memory that is open."""
    assert shared.buf is not None
    return shared.buf


class SharedBuckets(SharedMemory):
    """Memory of two buckets for a floor."""

    def __init__(self) -> None:
        super().__init__(create=True, size=2 * DEFAULT_BUCKET_BYTES)
        self.bytes[:] = bytes(len(self.bytes))  # so that its pages are there

    @property
    def bytes(self) -> memoryview:
        """All of it."""
        return whole(self)

    def __enter__(self) -> "SharedBuckets":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.unlink()


class FreePort:
    """Holds a port, without listening, until the block ends."""

    def __enter__(self) -> int:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        return int(self._socket.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def time_disk_write(size: str, repeats: int) -> Times:
    """From the trainer to a folder."""
    weights = Weights(size)
    times = Times(weights.plan.num_bytes)

    def write(version: int) -> None:
        write_weights(folder / "weights", weights.plan, weights.tensors.items(), version, keep=1)

    with Folder() as folder:
        for version in range(repeats):
            times.measure("write", lambda: write_plain(folder / "plain", weights))
            (folder / "plain").unlink()
            times.measure("sync", partial(write, version))
    return times


def time_disk_read(size: str, repeats: int) -> Times:
    """From a folder to the engine."""
    weights = Weights(size)
    times = Times(weights.plan.num_bytes)

    def take() -> None:
        with read_weights(folder / "weights", 0, deadline_s=DEADLINE_S) as stream:
            weights.take(stream)

    with Folder() as folder:
        write_plain(folder / "plain", weights)
        final = write_weights(folder / "weights", weights.plan, weights.tensors.items(), 0)
        for _ in range(repeats):
            drop_from_cache([folder / "plain", *final.glob("*.safetensors")])
            times.measure("read", lambda: read_plain(folder / "plain", weights))
            times.measure("sync", take)
    return times


def write_plain(path: Path, weights: Weights) -> None:
    """The disk's own rate of writing."""
    with path.open("wb", buffering=0) as file:
        for chunk in weights.chunks():
            file.write(chunk)
        os.fsync(file.fileno())


def read_plain(path: Path, weights: Weights) -> None:
    """The disk's own rate of reading."""
    with path.open("rb", buffering=0) as file:
        for chunk in weights.chunks():
            file.readinto(chunk)


def drop_from_cache(paths: list[Path]) -> None:
    """So that reading means the disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


class Folder:
    """A temporary folder on the disk of the current directory: /tmp may be memory."""

    def __enter__(self) -> Path:
        self._path = Path(tempfile.mkdtemp(prefix=".weightsync-bench-", dir="."))
        return self._path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path)


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
        """Both sides do their part; return when both are done."""
        self._commands.send("go")
        ours()
        self._commands.recv()


TRANSPORTS: dict[str, Callable[[str, int], Times]] = {
    "shared-memory": time_shared_memory,
    "broadcast": time_broadcast,
    "disk-write": time_disk_write,
    "disk-read": time_disk_read,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Speed of weight sync by each transport, beside its floor.")
    parser.add_argument("--size", choices=(*SIZES, "all"), default="all")
    parser.add_argument("--transport", choices=TRANSPORTS, nargs="+", default=list(TRANSPORTS))
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = list(SIZES) if arguments.size == "all" else [arguments.size]
    results: list[Result] = []
    for size in sizes:
        for transport in arguments.transport:
            results += results_of(size, transport, TRANSPORTS[transport](size, arguments.repeats))
    if arguments.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {arguments.repeats} repeats")
    print("| size | transport | sync, proved | floor | floor's rate | of the fastest | of the medians |")
    print("|---|---|---|---|---|---|---|")
    for each in results:
        print(
            f"| {each.size} | {each.transport} | {each.sync_s} s, {each.sync_gb_per_s} GB/s | {each.floor} "
            f"| {each.floor_gb_per_s} GB/s | {each.ratio_of_fastest} | {each.ratio_of_medians} |"
        )


if __name__ == "__main__":
    main()
