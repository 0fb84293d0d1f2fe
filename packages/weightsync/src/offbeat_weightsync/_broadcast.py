"""Weights over torch.distributed: one rank sends, the other ranks of a group receive.

The group agrees on version and plan, and at the end on what became of the sync. The bytes go by TCP streams of our own
(`_group_streams`) where they lie in host memory, else by the group's broadcast (`_group_windows`).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from torch import Tensor

from offbeat_mesh import Device, Group
from offbeat_types import WeightProof
from offbeat_weightsync._connections import Deadline
from offbeat_weightsync._group_streams import GroupStreams, receive_by_streams
from offbeat_weightsync._group_talk import GroupTalk, Terms, apart, device_of
from offbeat_weightsync._group_windows import BroadcastStream, receive_by_windows, send_by_windows
from offbeat_weightsync._peer_stream import PeerStream
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._windows import WINDOW_BYTES

MAX_STREAM_RECEIVERS: Final = 4
"""With more of them the group's broadcast, which is a tree, does better than one sender that talks to each."""


def broadcast_weights(
    group: Group,
    plan: BucketPlan,
    tensors: Iterable[tuple[str, Tensor]],
    version: int,
    *,
    deadline_s: float = 300.0,
    device: Device | None = None,
    streams: bool | None = None,
) -> list[WeightProof]:
    """Send one version to all other ranks of the group, and return what each has proved to hold, by group rank.

    All the others call `receive_broadcast` meanwhile. A trainer of several ranks lets one of them send; the others
    iterate the same tensors, where gathering them is a call of all.

    Args:
        group: used by nobody else while this goes on, and by no other thread: `mesh.group(..., channel="weights")`.
        plan: the tensors, in the order in which they come, and the dtypes in which they travel.
        tensors: (name, tensor) as planned; converted on the way. A collection goes over several streams at once.
        version: policy version; the receivers must ask for the same.
        deadline_s: time allowed, from here to the last proof.
        device: where windows lie; the world's by default.
        streams: send the bytes over TCP streams of our own (True) or by the group's broadcast (False); None: over
            streams on a CPU, to at most 4 receivers.

    Raises:
        WeightSyncError: tensors differ from the plan; a receiver failed, wants another version, or holds other bytes.
        PeerFailedError: a rank died.
        DeadlineError: a rank did not come, load or prove in time.
    """
    talk = GroupTalk(group, group.rank, version, Deadline(f"weight sync of version {version}", deadline_s))
    on_cpu = device_of(device).torch_device.type == "cpu"
    if on_cpu and group.size - 1 <= MAX_STREAM_RECEIVERS if streams is None else streams:
        return GroupStreams(talk, plan).send(tensors)
    terms = Terms(plan, WINDOW_BYTES if on_cpu else plan.bucket_bytes)
    apart(lambda: talk.offer(terms))
    return send_by_windows(talk, terms, tensors, device)


@contextmanager
def receive_broadcast(
    group: Group, version: int, *, source: int = 0, deadline_s: float = 300.0, device: Device | None = None
) -> Iterator[BroadcastStream | PeerStream]:
    """Receive what the group's `source` sends with `broadcast_weights`, and yield the stream. Blocking: use a thread.

        with receive_broadcast(group, version) as stream:
            proof = engine.update_weights(stream, version)   # loads, then calls stream.prove
            stream.confirm(proof)

    Leaving the block with an error, or without `confirm`, makes all ranks fail with that reason.

    Args:
        group: used by nobody else while this goes on, and by no other thread.
        version: policy version wanted.
        source: group-relative rank of the sender.
        deadline_s: time allowed, from here to the end of the block.
        device: where windows lie; the world's by default.

    Raises:
        WeightSyncError: the sender or another receiver failed, another version is sent, or the bytes differ.
        PeerFailedError: a rank died.
        DeadlineError: a rank did not come in time.
    """
    deadline = Deadline(f"weight sync of version {version} at rank {group.ranks[group.rank]}", deadline_s)
    talk = GroupTalk(group, source, version, deadline)
    terms = apart(talk.learn)
    receiving = receive_by_streams(talk, terms) if terms.address else receive_by_windows(talk, terms, device)
    with receiving as stream:
        yield stream
