"""A folder that trainer and engines see: each version is there whole, as safetensors files, or not at all."""

import shutil
import socket
from pathlib import Path
from typing import Final

import msgspec

from offbeat_core import DeadlineError, WeightSyncError
from offbeat_weightsync._connection import Connection, Deadline, FilesWritten, Loaded, Offer
from offbeat_weightsync._peer_stream import PeerStream
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._sender import WeightSender, await_loaded, raise_if_spoken
from offbeat_weightsync._stream import MAX_RUN_BYTES, Room, Runs, read_runs
from offbeat_weightsync._tensors import PlannedTensors
from offbeat_weightsync._transport import Route, Transport
from offbeat_weightsync._transports.tcp import TcpSender
from offbeat_weightsync._transports.version_folder import VersionFolder, await_path, open_version
from offbeat_weightsync._weight_group import WeightGroup

SEEN_S: Final = 10.0
"""Time for a folder of the sender to appear at a receiver."""


class DiskTransport(Transport):
    """Weights in files, which stay there: others may read them too."""

    reach = "network"
    writes_files = True

    @classmethod
    def complaint(cls, route: Route) -> str:
        """Refuse changes alone: what is written is a whole version."""
        if not route.sends_changes:
            return ""
        return "writes all weights of every version: leave rollout.full_sync_every at 1, or take another transport"

    @classmethod
    def describe(cls, route: Route) -> str:
        """Return through which folder."""
        return f"through {route.folder or 'the run folder'}, as safetensors files"

    def open_sender(self, address: str, plan: BucketPlan, *, name: str = "trainer-0") -> WeightSender:
        """Listen at an address of this machine, and lock the folder."""
        return DiskSender(address, plan, self._folder, name=name)

    @classmethod
    def open_stream(
        cls, connection: Connection, plan: BucketPlan, version: int, offer: Offer, group: WeightGroup | None
    ) -> PeerStream:
        """See that the folder is here."""
        folder = Path(offer.folder)
        _check_seen(folder, connection)
        return FolderStream(connection, plan, version, folder)


class DiskSender(TcpSender):
    """Sends weights through a folder that all sides see: a version is there whole, as safetensors files, or not at all.

    The version sent last stays there; those before it, and what a former sender has left, are removed.

    Args:
        address: from `new_address(host)`. What is not named here: see `WeightSender`.
        folder: of versions, for this sender alone; made if it is not there.

    Raises:
        WeightSyncError: the address is in use, or none of this machine; the folder cannot be written, or another sender
            writes to it.
    """

    transport = "disk"

    def __init__(
        self,
        address: str,
        plan: BucketPlan,
        folder: str | Path,
        *,
        deadline_s: float = 300.0,
        name: str = "trainer-0",
    ) -> None:
        self._folder = VersionFolder(Path(folder).absolute())
        try:
            super().__init__(address, plan, deadline_s=deadline_s, name=name)
        except BaseException:
            self._folder.close()
            raise

    def close(self) -> None:
        """Stop listening and let others write to the folder."""
        super().close()
        self._folder.close()

    def _offer(self, peer: Connection, offer: Offer) -> None:
        peer.send(msgspec.structs.replace(offer, folder=str(self._root(offer.digest))))

    def _root(self, digest: str) -> Path:
        """Return where versions of a plan lie; those of a part of the tensors by themselves."""
        return self._folder.path if digest == self.plan.digest else self._folder.path / f"plan-{digest}"

    def _send_buckets(self, peers: list[Connection], plan: BucketPlan, source: PlannedTensors, version: int) -> None:
        root, deadline = self._root(plan.digest), peers[0].deadline

        def check() -> None:
            deadline.raise_if_withdrawn("the disk")
            raise_if_spoken(peers)

        self._folder.write(root, plan, source, version, check)
        for peer in peers:
            peer.send(FilesWritten())
        await_loaded(peers, plan, len(plan.buckets) - 1)
        if root != self._folder.path:
            shutil.rmtree(root)


class FolderStream(PeerStream):
    """A `WeightStream` from a folder that the sender writes. Made by `receive`."""

    def __init__(self, connection: Connection, plan: BucketPlan, version: int, folder: Path) -> None:
        super().__init__(connection, plan, version)
        self._folder = folder

    def _arrive(self, room: Room) -> Runs:
        connection = self._connection
        connection.receive(FilesWritten, f"version {self.version} in {self._folder}")
        plan, _, opened = open_version(self._folder, self.version, connection.deadline)
        with opened as files:
            if plan.digest != self.plan.digest:
                raise WeightSyncError(f"{self._folder} holds other tensors than {connection.peer} has announced")
            yield from read_runs(self.plan, MAX_RUN_BYTES, files.read, room)
        connection.send(Loaded(len(self.plan.buckets) - 1))


def _check_seen(folder: Path, connection: Connection) -> None:
    """Raise WeightSyncError if a folder is not one that both sides see."""
    root = folder.parent if folder.name.startswith("plan-") else folder  # the other is made with the version
    try:
        await_path(root, str(root), Deadline("weight sync's folder", min(SEEN_S, connection.deadline.left_s())))
    except DeadlineError:
        raise WeightSyncError(
            f"{folder} of {connection.peer} is not on {socket.gethostname()}: give it under a path that both see"
        ) from None
