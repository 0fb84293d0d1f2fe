"""Floors of every weight sync: plain copies, hashes, sockets and files of as many bytes, in the same memory."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from offbeat_weightsync import BucketPlan, describe_tensors

Shapes = list[tuple[str, tuple[int, ...]]]
Bytes = npt.NDArray[np.uint8]

CHUNK_BYTES = 4 << 20
WINDOW_BYTES = 8 << 20
SHARED_BYTES = 8 << 20
"""Bytes of shared memory, used over and over: it stays in the cache between the two processes."""
OWN_BYTES = 256 << 20
"""Bytes of memory to copy from and to: more than any cache holds."""
DEADLINE_S = 300.0

SIZES = {
    "tiny": {"vocabulary": 512, "hidden": 64, "key_value": 32, "feed_forward": 128, "layers": 2},
    "smollm2-135m": {"vocabulary": 49152, "hidden": 576, "key_value": 192, "feed_forward": 1536, "layers": 30},
    "1b": {"vocabulary": 128256, "hidden": 2048, "key_value": 512, "feed_forward": 8192, "layers": 16},
}


def llama_shapes(size: dict[str, int]) -> Shapes:
    """Return names and shapes of a Llama with tied embeddings."""
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


class Weights:
    """The trainer's tensors, or an engine's, and as good memory to measure a plain copy with.

    Args:
        size: one of SIZES.
    """

    def __init__(self, size: str) -> None:
        torch.set_num_threads(1)
        self.size = size
        shapes = llama_shapes(SIZES[size])
        self.tensors = {name: torch.full(shape, 0.5, dtype=torch.bfloat16) for name, shape in shapes}
        self.others: dict[str, torch.Tensor] = {}
        self.plan = BucketPlan.build(describe_tensors(self.tensors.items()))
        whole_chunks = -(-self.plan.num_bytes // CHUNK_BYTES) * CHUNK_BYTES
        # torch's memory, as the tensors' is: numpy's would have huge pages, which are copied faster. All of it touched.
        self.source, self.target = (
            torch.full((min(whole_chunks, OWN_BYTES),), value, dtype=torch.uint8).numpy() for value in (1, 2)
        )

    def parts(self, step: int) -> Iterator[tuple[int, int]]:
        """Return (start, length) of as many bytes as the tensors have."""
        for start in range(0, self.plan.num_bytes, step):
            yield start, min(step, self.plan.num_bytes - start)

    def chunks(self) -> Iterator[memoryview]:
        """Return as many bytes as the tensors have, in pieces of our own memory."""
        for start, length in self.parts(CHUNK_BYTES):
            first = start % len(self.target)
            yield self.target.data[first : first + length]


def copy(weights: Weights) -> None:
    """Copy once by one thread, in the longest runs."""
    for _, length in weights.parts(len(weights.source)):
        np.copyto(weights.target[:length], weights.source[:length])


def copy_tensors(weights: Weights) -> None:
    """Copy the same from tensor to tensor, one after the other."""
    for name, tensor in weights.tensors.items():
        np.copyto(weights.others[name].view(torch.uint8).numpy(), tensor.view(torch.uint8).numpy())


def copy_in(weights: Weights, shared: memoryview) -> None:
    """Copy into shared memory repeatedly."""
    for start, length in weights.parts(CHUNK_BYTES):
        np.copyto(_window(shared, start, length), _own(weights.source, start, length))


def copy_out(weights: Weights, shared: memoryview) -> None:
    """Copy out of shared memory."""
    for start, length in weights.parts(CHUNK_BYTES):
        np.copyto(_own(weights.target, start, length), _window(shared, start, length))


def send_all(plain: socket.socket, weights: Weights) -> None:
    """Run the sending side of a plain loopback connection."""
    for chunk in weights.chunks():
        plain.sendall(chunk)


def receive_all(plain: socket.socket, weights: Weights) -> None:
    """Run the receiving side of a plain loopback connection."""
    for chunk in weights.chunks():
        done = 0
        while done < len(chunk):
            done += plain.recv_into(chunk[done:])


def broadcast_all(weights: Weights) -> None:
    """Broadcast by gloo alone, on either side."""
    whole = torch.from_numpy(weights.target)
    for start, length in weights.parts(WINDOW_BYTES):
        first = start % len(whole)
        dist.broadcast(whole[first : first + length], 0)


def write_plain(path: Path, weights: Weights) -> None:
    """Write to the disk without anything else."""
    with path.open("wb", buffering=0) as file:
        for chunk in weights.chunks():
            file.write(chunk)
        os.fsync(file.fileno())


def read_plain(path: Path, weights: Weights) -> None:
    """Read from the disk without anything else."""
    with path.open("rb", buffering=0) as file:
        for chunk in weights.chunks():
            file.readinto(chunk)


def drop_from_cache(paths: list[Path]) -> None:
    """Drop the file from the page cache, so that a read goes to the disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def whole(shared: SharedMemory) -> memoryview:
    """Return the bytes of shared memory that is open."""
    assert shared.buf is not None
    return shared.buf


@contextmanager
def between() -> Iterator[SharedMemory]:
    """Make shared memory for a floor, with its pages allocated."""
    shared = SharedMemory(create=True, size=SHARED_BYTES)
    whole(shared)[:] = bytes(SHARED_BYTES)
    try:
        yield shared
    finally:
        shared.close()
        shared.unlink()


@contextmanager
def free_port() -> Iterator[int]:
    """Hold a port, without listening, until the block ends."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


@contextmanager
def folder_on_disk() -> Iterator[Path]:
    """Make a temporary folder on the disk of the current directory, because /tmp may be memory."""
    with tempfile.TemporaryDirectory(prefix=".weightsync-bench-", dir=".") as folder:
        yield Path(folder)


def _own(memory: Bytes, start: int, length: int) -> Bytes:
    first = start % len(memory)
    return memory[first : first + length]


def _window(shared: memoryview, start: int, length: int) -> Bytes:
    first = start % len(shared)
    return np.frombuffer(shared[first : first + length], np.uint8)
