"""The rollout engine's side of the transports between processes: join a sender, and take what it sends."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path

from offbeat_types import OffbeatError, TensorSpec, WeightSyncError
from offbeat_weightsync._addresses import TcpAddress
from offbeat_weightsync._changes import kept_digest
from offbeat_weightsync._connections import Connection, Deadline
from offbeat_weightsync._messages import Hello, Join, Ready, Welcome
from offbeat_weightsync._peer_stream import PeerStream
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._shared_stream import SharedMemoryStream, connect_shared
from offbeat_weightsync._tcp import connect_tcp, join_tcp
from offbeat_weightsync._tcp_stream import TcpStream

Specs = tuple[tuple[str, str, tuple[int, ...]], ...]


@contextmanager
def receive(
    address: str | Path,
    version: int,
    deadline_s: float,
    *,
    name: str = "rollout-0",
    held: Mapping[str, str] | None = None,
) -> Iterator[PeerStream]:
    """Connect to a `WeightSender` and yield the stream of one version. Blocking: use a thread.

        with receive(address, version, deadline_s=60, name="rollout-1") as stream:
            proof = engine.update_weights(stream, version)   # iterates, then calls stream.prove
            stream.confirm(proof)

    Leaving the block with an error, or without `confirm`, makes the sender fail with that reason.

    Args:
        address: where the sender listens: its `address`.
        version: policy version wanted.
        deadline_s: time allowed from here to the end of `confirm`.
        name: this side, for the sender's errors.
        held: checksum of each tensor the engine holds, from `tensor_checksums`, to be sent changes alone; the stream's
            plan then has only those. None: everything.

    Raises:
        WeightSyncError: the sender is not there, refuses the token, failed or died, sends another version, or the
            bytes differ.
        DeadlineError: it did not come in time.
    """
    deadline = Deadline(f"weight sync of version {version} at {name}", deadline_s)
    tcp = TcpAddress.parse(str(address))
    connection = connect_shared(address, deadline) if tcp is None else connect_tcp(tcp, deadline)
    lanes: list[Connection] = []
    try:
        join = Join(name, version, None if held is None else dict(held))
        if tcp is None:
            connection.send(join)
        else:
            lanes = join_tcp(tcp, join, connection)
        with closing(_open_stream(connection, version, held, lanes)) as stream:
            yield stream
        stream.check_confirmed(name)
    except BaseException as error:
        connection.fail(str(error) if isinstance(error, OffbeatError) else f"{type(error).__name__}: {error}")
        raise
    finally:
        for each in (*lanes, connection):
            each.close()


def _open_stream(
    connection: Connection, version: int, held: Mapping[str, str] | None, lanes: list[Connection]
) -> PeerStream:
    connection.peer = connection.receive(Welcome, "its plan").name
    for lane in lanes:
        lane.peer = connection.peer
    hello = connection.receive(Hello, "its plan")
    plan = _build_plan(tuple(hello.specs), hello.bucket_bytes)
    if plan.digest != hello.digest:
        raise WeightSyncError(
            f"the plans differ: {hello.digest} at {connection.peer}, {plan.digest} here; same version?"
        )
    if hello.kept and (held is None or kept_digest(held, {spec.name for spec in plan.specs}) != hello.kept):
        raise WeightSyncError(
            f"{connection.peer} sends changes to other weights than are held here; ask for everything"
        )
    stream: PeerStream
    if lanes:
        stream = TcpStream(connection, plan, version, hello, lanes[: len(hello.lanes)])
    else:
        stream = SharedMemoryStream(connection, plan, version, hello)
    connection.send(Ready(plan.digest))
    return stream


@lru_cache(maxsize=4)
def _build_plan(specs: Specs, bucket_bytes: int) -> BucketPlan:
    """The same plan comes with version after version."""
    return BucketPlan.build([TensorSpec(*spec) for spec in specs], bucket_bytes)
