"""Speed of weight sync by each transport, proof included, compared with its floors in the same run.

    python tools/bench/weightsync.py [--size tiny|smollm2-135m|1b|all] [--transport NAME ...] [--repeats N] [--json]

The trainer's tensors are bfloat16; the engine loads each into its own, proves all of them, and confirms. A time is that
of the whole sync, from the call to the last proof; trainer and engine are two processes. Floors:

    memcpy     one copy of as many bytes by one thread, from and to memory of the tensors' kind, all of it touched:
               nothing that fills another process's own memory does less
    tensors    the same, from the trainer's tensors to others like them, one after the other
    two-copy   two processes copy as many bytes each, at the same time and without a word: one into shared memory that
               stays in the cache, the other out of it. Between processes that keep their own tensors nothing does less
    loopback   a plain TCP connection on 127.0.0.1, one process sends and another receives as many bytes
    gloo       torch.distributed's broadcast of as many bytes in windows of 8 MiB, from and to memory that is there
    write      a plain file of as many bytes, written and fsynced, on the same disk
    read       the same file, read after its pages were dropped from the cache

`adapter` and `changes` bring less than all weights (a LoRA adapter of rank 16; the 3 % of the elements that have
changed): their floor is a sync of all weights, so the ratio says how many times faster they are.

On a machine that does other things too, run it at real-time priority: chrt -f 5 python tools/bench/weightsync.py ...

Floor and sync take turns; the ratio is that of the medians, and that of the fastest of each.
"""

import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the modules beside this one, here and in the other process

import torch
from bench.harness import Row, parser_of, show
from bench.weightsync_floors import (
    DEADLINE_S,
    SIZES,
    Weights,
    between,
    broadcast_all,
    copy,
    copy_in,
    copy_tensors,
    drop_from_cache,
    folder_on_disk,
    free_port,
    read_plain,
    send_all,
    whole,
    write_plain,
)
from bench.weightsync_payloads import adapter_tensors, flips, sent_bytes
from bench.weightsync_peers import (
    Peer,
    be_broadcast_engine,
    be_payload_engine,
    be_shared_memory_engine,
    be_tcp_engine,
    take,
)

from offbeat_mesh import join_world
from offbeat_weightsync import (
    BucketPlan,
    GroupSender,
    SharedMemorySender,
    WeightCopy,
    describe_tensors,
    new_address,
    new_socket_path,
    open_sender,
    read_weights,
    write_weights,
)


@dataclass
class Times:
    """Seconds of each repeat, by what was measured: "sync" and floors."""

    num_bytes: int
    sync_bytes: int = 0  # where a sync brings fewer than its floor
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, what: str, function: Callable[[], object]) -> None:
        """Run once."""
        start, cpu_start = time.perf_counter(), time.process_time()
        function()
        self.cpu_seconds.setdefault(what, []).append(time.process_time() - cpu_start)
        self.seconds.setdefault(what, []).append(time.perf_counter() - start)


def _warm_median(seconds: list[float]) -> float:
    return statistics.median(seconds[1:] or seconds)


def rows_of(size: str, transport: str, times: Times) -> Iterator[Row]:
    """Return one row for each floor, by medians. Ratios are floor / sync; the first, cold repeat does not count."""
    sync = times.seconds["sync"][1:] or times.seconds["sync"]
    sync_s = statistics.median(sync)
    for floor, seconds in times.seconds.items():
        if floor == "sync":
            continue
        warm = seconds[1:] or seconds
        yield {
            "size": size,
            "transport": transport,
            "sync_s": sync_s,
            "sync_mb": (times.sync_bytes or times.num_bytes) / 1e6,
            "sync_gb_per_s": (times.sync_bytes or times.num_bytes) / sync_s / 1e9,
            "floor": floor,
            "floor_gb_per_s": times.num_bytes / statistics.median(warm) / 1e9,
            "ratio_of_medians": statistics.median(warm) / sync_s,
            "ratio_of_fastest": min(warm) / min(sync),
            "trainers_cpu_ms": 1e3 * _warm_median(times.cpu_seconds["sync"]),
            "trainers_cpu_ratio": _warm_median(times.cpu_seconds[floor]) / _warm_median(times.cpu_seconds["sync"]),
        }


def time_shared_memory(weights: Weights, times: Times, repeats: int) -> None:
    """Time two processes of one host."""
    weights.others = {name: torch.full_like(tensor, 0.25) for name, tensor in weights.tensors.items()}
    with (
        SharedMemorySender(new_socket_path(), weights.plan, deadline_s=DEADLINE_S) as sender,
        between() as shared,
        Peer(be_shared_memory_engine, sender.socket_path, shared.name, weights.size, repeats) as peer,
    ):
        for version in range(repeats):
            times.measure("memcpy", lambda: copy(weights))
            times.measure("tensors", lambda: copy_tensors(weights))
            times.measure("two-copy", lambda: peer.do_with(lambda: copy_in(weights, whole(shared))))
            times.measure("sync", partial(sender.send, weights.tensors.items(), version, 1))


def time_tcp(weights: Weights, times: Times, repeats: int) -> None:
    """Time two processes, as if on two hosts."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        open_sender(new_address("127.0.0.1"), weights.plan, deadline_s=DEADLINE_S) as sender,
        Peer(be_tcp_engine, sender.address, listener.getsockname()[1], weights.size, repeats) as peer,
    ):
        plain, _ = listener.accept()
        with plain:
            for version in range(repeats):
                times.measure("loopback", lambda: peer.do_with(lambda: send_all(plain, weights)))
                times.measure("sync", partial(sender.send, weights.tensors.items(), version, 1))


def time_broadcast(weights: Weights, times: Times, repeats: int) -> None:
    """Time a group of two over gloo, beside a world of two for the floor."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        free_port() as port,
        GroupSender(new_address("127.0.0.1"), weights.plan, deadline_s=DEADLINE_S) as sender,
    ):
        place, world = listener.getsockname()[1], f"127.0.0.1:{port}"
        with Peer(be_broadcast_engine, sender.address, world, place, weights.size, repeats) as peer:
            plain, _ = listener.accept()
            with plain, join_world(rank=0, size=2, address=world, device="cpu", deadline_s=DEADLINE_S):
                for version in range(repeats):
                    times.measure("loopback", lambda: peer.do_with(lambda: send_all(plain, weights)))
                    times.measure("gloo", lambda: peer.do_with(lambda: broadcast_all(weights)))
                    times.measure("sync", partial(sender.send, weights.tensors.items(), version, 1))


def time_disk_write(weights: Weights, times: Times, repeats: int) -> None:
    """Time a sync from the trainer to a folder."""

    def write(version: int) -> None:
        write_weights(folder / "weights", weights.plan, weights.tensors.items(), version, keep=1)

    with folder_on_disk() as folder:
        for version in range(repeats):
            times.measure("write", lambda: write_plain(folder / "plain", weights))
            (folder / "plain").unlink()
            times.measure("sync", partial(write, version))


def time_disk_read(weights: Weights, times: Times, repeats: int) -> None:
    """Time a sync from a folder to the engine."""

    def read() -> None:
        with read_weights(folder / "weights", 0, deadline_s=DEADLINE_S) as stream:
            take(weights, stream)

    with folder_on_disk() as folder:
        write_plain(folder / "plain", weights)
        final = write_weights(folder / "weights", weights.plan, weights.tensors.items(), 0)
        for _ in range(repeats):
            drop_from_cache([folder / "plain", *final.glob("*.safetensors")])
            times.measure("read", lambda: read_plain(folder / "plain", weights))
            times.measure("sync", read)


def time_adapter(weights: Weights, times: Times, repeats: int) -> None:
    """Time a LoRA adapter alone, by shared memory; the floor is a sync of all weights."""
    adapter = adapter_tensors(weights.size)
    plan = BucketPlan.build(describe_tensors(adapter.items()))
    times.sync_bytes = plan.num_bytes
    both = BucketPlan.build([*weights.plan.specs, *plan.specs])
    with (
        SharedMemorySender(new_socket_path(), both, deadline_s=DEADLINE_S) as sender,
        Peer(be_payload_engine, sender.address, weights.size, repeats, "adapter"),
    ):
        for version in range(repeats):
            whole_sync = partial(sender.send, weights.tensors.items(), 2 * version, 1, plan=weights.plan)
            times.measure("all weights", whole_sync)
            times.measure("sync", partial(sender.send, adapter.items(), 2 * version + 1, 1, plan=plan))


def time_changes(host: str, weights: Weights, times: Times, repeats: int) -> None:
    """Time changed elements alone; the floor is a sync of all weights by the same transport. The first sends all."""
    copy, flip = WeightCopy(repeats), flips(weights.tensors)
    with (
        open_sender(new_address(host), weights.plan, deadline_s=DEADLINE_S) as sender,
        Peer(be_payload_engine, sender.address, weights.size, repeats, "changes"),
    ):
        for version in range(repeats):
            flip()
            times.measure("all weights", partial(sender.send, weights.tensors.items(), 2 * version, 1))
            times.measure("sync", partial(sender.send, weights.tensors.items(), 2 * version + 1, 1, copy=copy))
    times.sync_bytes = sent_bytes(weights.tensors, flip)


TRANSPORTS: dict[str, Callable[[Weights, Times, int], None]] = {
    "shared-memory": time_shared_memory,
    "tcp": time_tcp,
    "broadcast": time_broadcast,
    "adapter": time_adapter,
    "changes": partial(time_changes, ""),
    "changes-tcp": partial(time_changes, "127.0.0.1"),
    "disk-write": time_disk_write,
    "disk-read": time_disk_read,
}


def measure(size: str, transport: str, repeats: int) -> list[Row]:
    """Return the rows of one transport; its tensors are gone before those of the next are made."""
    weights = Weights(size)
    times = Times(weights.plan.num_bytes)
    TRANSPORTS[transport](weights, times, repeats)
    return list(rows_of(size, transport, times))


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, repeats=8)
    parser.add_argument("--size", choices=(*SIZES, "all"), default="all")
    parser.add_argument("--transport", choices=TRANSPORTS, nargs="+", default=list(TRANSPORTS))
    arguments = parser.parse_args()
    sizes = list(SIZES) if arguments.size == "all" else [arguments.size]
    rows: list[Row] = []
    for size in sizes:
        for transport in arguments.transport:
            rows += measure(size, transport, arguments.repeats)
    show(rows, as_json=arguments.json, title=f"{arguments.repeats} repeats")


if __name__ == "__main__":
    main()
