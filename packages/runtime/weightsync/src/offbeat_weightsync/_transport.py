"""The interface of a transport: one way for weights from a trainer to rollout engines, chosen once by its name.

A transport is a class under the entry point `offbeat.transport`. Both sides make one of their own at their start; after
that they push and pull by it, and nothing asks any more which one it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Literal

from offbeat_core import WeightSyncError
from offbeat_weightsync._changes import WeightCopy
from offbeat_weightsync._connection import Connection, Offer
from offbeat_weightsync._peer_stream import KeptStream, PeerStream
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._receiver import receive, transport_class
from offbeat_weightsync._sender import WeightSender
from offbeat_weightsync._weight_group import WeightGroup

Reach = Literal["machine", "network", "either"]
"""Engines on the trainer's machine alone; engines anywhere, by an address; or by the better of the two."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The place of a trainer or of an engine.

    Args:
        node: name of its machine.
        device: what it computes on, as the configuration says: "cuda:0", "cpu", "auto".
        index: of the device that a plan has given it on that machine; None where it was given none.
        kind: of that device, as the plan calls it: "GPU", "cuda"; "" where it was given none.
    """

    node: str
    device: str
    index: int | None = None
    kind: str = ""

    @property
    def has_ipc(self) -> bool:
        """Tell whether it surely computes on a CUDA device, whose memory processes can share."""
        return self.device.startswith("cuda") or self.kind in ("GPU", "cuda")


@dataclass(frozen=True, kw_only=True)
class Route:
    """Route of weights, and what is asked of their transport.

    Args:
        senders: the ranks of the trainer, in order.
        receivers: the engines, or of those that are split over several devices each of their ranks, in a row.
        engine_width: number of receivers that are one engine.
        shares_devices: trainer and engines take turns on the same devices.
        sends_changes: most versions bring the elements alone that have changed.
        folder: where files may be written; "" for the default.
        loads_on_device: engines load tensors that are on their device, without a copy through the host.
    """

    senders: Sequence[Endpoint]
    receivers: Sequence[Endpoint]
    engine_width: int = 1
    shares_devices: bool = False
    sends_changes: bool = False
    folder: str = ""
    loads_on_device: bool = False

    @property
    def sender(self) -> Endpoint:
        """Rank 0 of the trainer, which sends by all transports that do not assign engines to several ranks."""
        return self.senders[0]

    @property
    def engines(self) -> list[Sequence[Endpoint]]:
        """The receivers of each engine."""
        starts = range(0, len(self.receivers), self.engine_width)
        return [self.receivers[start : start + self.engine_width] for start in starts]

    @property
    def elsewhere(self) -> Endpoint | None:
        """The first engine on another machine than the trainer's; None where there is none."""
        return next((each for each in self.receivers if each.node != self.sender.node), None)


class Transport(ABC):
    """One way for weights. Each side makes one, by `open_transport`, and keeps it until it ends.

    Args:
        device: of this side, by name.
        folder: where the trainer may write files for the engines.
    """

    reach: ClassVar[Reach]
    writes_files: ClassVar[bool] = False
    """Versions lie in `folder` for a time, and take room there."""

    def __init__(self, device: str = "cpu", folder: str = "") -> None:
        self._device, self._folder = device, folder

    @classmethod
    def complaint(cls, route: Route) -> str:
        """Return why weights cannot go this route, with what to do about it; "" where they can."""
        if cls.reach == "machine" and (other := route.elsewhere) is not None:
            return (
                f"reaches the trainer's machine alone, and an engine is on {other.node}, the trainer on "
                f'{route.sender.node}: set it to "auto"'
            )
        return ""

    @classmethod
    def settle(cls, name: str, route: Route) -> str:
        """Return the name of the transport to use on a route where `name`, which is this one, was asked for."""
        return name

    @classmethod
    def assign(cls, route: Route) -> list[int]:
        """Return for each receiver the rank of the trainer that sends to it, on a route without complaint."""
        return [0] * len(route.receivers)

    @classmethod
    @abstractmethod
    def describe(cls, route: Route) -> str:
        """Return how weights go this route, in a few words: "by TCP"."""

    # ── the trainer's side ────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def open_sender(self, address: str, plan: BucketPlan, *, name: str = "trainer-0") -> WeightSender:
        """Listen for engines.

        Args:
            address: from `new_address(host)`, or `new_socket_path()` for this machine alone.
            plan: the tensors, in the order in which they will be given, and the dtypes in which they travel.
            name: of this side, for the engines' errors.

        Raises:
            WeightSyncError: it cannot listen there, or has not what it needs.
        """

    # ── the engine's side ─────────────────────────────────────────────────────────────────────────────────────────

    def get_ready(self) -> None:  # noqa: B027 - most need nothing
        """Make ready to receive, at the engine's start.

        Raises:
            ConfigError: this device cannot.
        """

    @property
    def on_device(self) -> bool:
        """Return whether weights come to this side's device: workers of an engine may then receive by themselves."""
        return False

    def receive(
        self,
        address: str,
        version: int,
        deadline_s: float,
        *,
        name: str,
        copy: WeightCopy | None = None,
        worker: tuple[int, Sequence[int]] | None = None,
    ) -> AbstractContextManager[PeerStream | KeptStream]:
        """Join the sender that listens at an address, and take what it sends: see `offbeat_weightsync.receive`."""
        return receive(address, version, deadline_s, name=name, copy=copy, worker=worker)

    @classmethod
    def open_stream(
        cls, connection: Connection, plan: BucketPlan, version: int, offer: Offer, group: WeightGroup | None
    ) -> PeerStream:
        """Open what a sender of this transport has offered.

        Args:
            connection: to the sender.
            plan: of what comes.
            version: that was asked for.
            offer: of the sender.
            group: that this side has joined with.

        Raises:
            WeightSyncError: it cannot be opened here.
        """
        raise WeightSyncError(f"{cls.__name__} has no stream of its own")

    def close(self) -> None:  # noqa: B027 - most keep nothing
        """Let go of what this side has kept from sync to sync."""


def open_transport(name: str, device: str = "cpu", folder: str = "") -> Transport:
    """Make this side of a transport.

    Args:
        name: "auto", "shared-memory", "cuda-ipc", "tcp", "nccl", "disk", or one that another package has registered.
        device: of this side, by name.
        folder: where the trainer may write files for the engines.

    Raises:
        BackendError: there is no transport of this name.
        ConfigError: it cannot be used on this device.
    """
    transport: Transport = transport_class(name)(device, folder)
    return transport
