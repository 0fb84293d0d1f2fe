"""The rollout engine's side of a sync: join a sender, by whatever transport it sends, and take what it sends."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from offbeat_core import WeightSyncError, load_backend
from offbeat_weightsync._addresses import connect
from offbeat_weightsync._changes import WeightCopy
from offbeat_weightsync._connection import Connection, Deadline, Join, Offer, Ready, Welcome, worker_name
from offbeat_weightsync._peer_stream import KeptStream, PeerStream
from offbeat_weightsync._plan import agreed_plan
from offbeat_weightsync._tensors import kept_digest
from offbeat_weightsync._weight_group import WeightGroup

TRANSPORTS: Final = "offbeat.transport"
"""Entry points of transports."""


@contextmanager
def receive(
    address: str | Path,
    version: int,
    deadline_s: float,
    *,
    name: str = "rollout-0",
    held: Mapping[str, str] | None = None,
    copy: WeightCopy | None = None,
    group: WeightGroup | None = None,
    worker: tuple[int, Sequence[int]] | None = None,
) -> Iterator["PeerStream | KeptStream"]:
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
        copy: of what came last, to be sent changed elements alone where the sender has kept the same. The stream gives
            all tensors, whole, in any case.
        group: kept from version to version, where a `GroupSender` sends.
        worker: rank of this process among those that receive for the engine `name` together, and the ranks of all of
            them that ask this sender. Each takes all bytes and proves its parts (`ArrivingStream.sum_parts`). The
            sender waits for all of them, counts them as one receiver, and calls this one "rollout-0.worker-1". None:
            this process receives for all of the engine.

    Raises:
        WeightSyncError: the sender is not there, refuses the token, failed or died, sends another version, or the
            bytes differ.
        DeadlineError: it did not come in time.
    """
    engine, workers = ("", ()) if worker is None else (name, tuple(worker[1]))
    if worker is not None:
        name = worker_name(engine, worker[0])
    connection = connect(address, Deadline(f"weight sync of version {version} at {name}", deadline_s))
    try:
        join = Join(
            name,
            version,
            held=None if held is None else dict(held),
            copy="" if copy is None else copy.digest,
            member=None if group is None else group.member,
            engine=engine,
            workers=workers,
        )
        connection.send(join)
        stream = _open_stream(connection, version, held, copy, group)
        try:
            yield stream
        finally:
            stream.close()
        stream.check_confirmed(name)  # within: without `confirm` the sender gets a failure
    except BaseException as error:
        connection.fail(error)
        if group is not None:
            group.leave()  # the sender makes another one after a failure
        raise
    finally:
        connection.close()


def _open_stream(
    connection: Connection,
    version: int,
    held: Mapping[str, str] | None,
    copy: WeightCopy | None,
    group: WeightGroup | None,
) -> "PeerStream | KeptStream":
    connection.peer = connection.receive(Welcome, "its plan").name
    offer = connection.receive(Offer, "its plan")
    plan = agreed_plan(offer.specs, offer.bucket_bytes, offer.digest, connection.peer)
    # What is not sent is what the sender believes to be held here: it must be the same.
    if offer.kept and (held is None or kept_digest(held, {spec.name for spec in plan.specs}) != offer.kept):
        raise WeightSyncError(
            f"{connection.peer} sends changes to other weights than are held here; ask for everything"
        )
    stream: PeerStream = transport_class(offer.transport).open_stream(connection, plan, version, offer, group)
    stream.checksum = offer.checksum
    connection.send(Ready(plan.digest))  # only now: what the bytes come through is open
    return stream if copy is None else KeptStream(stream, copy, changes=offer.changes)


@cache
def transport_class(name: str) -> Any:
    """Return the subclass of `Transport` that is registered under a name.

    Raises:
        BackendError: there is none.
    """
    return load_backend(TRANSPORTS, name)
