"""The world: all processes of a run, joined once (`join_world`), left once."""

import atexit
import os
import secrets
import socket
import sys
import weakref
from collections import Counter
from datetime import timedelta
from ipaddress import ip_address
from itertools import count
from types import TracebackType
from typing import Final, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from offbeat_core import ConfigError, DeadlineError, available_devices
from offbeat_device import Device, open_device
from offbeat_mesh._control import ControlClient, ControlServer
from offbeat_mesh._control_messages import Record


def open_store(host: str, port: int = 0, *, deadline_s: float = 300.0) -> TCPStore:
    """Open a store that can be reached at `host` and nowhere else.

    Expected: `TCPStore(host, ...)` listens on that address. What happens: it listens on all, whatever the host (torch
    2.13, TCPStoreLibUvBackend.cpp), so that any host in the network can read and write what ranks exchange. But it
    takes a socket that listens already.

    Args:
        host: an address of this machine; 127.0.0.1 where all ranks are on it.
        port: 0 for a free one; see `TCPStore.port`.
        deadline_s: of every wait at the store.

    Raises:
        OSError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=4096) as listener:
        own_port = int(listener.getsockname()[1])
        timeout = timedelta(seconds=deadline_s)
        store = TCPStore(
            host, own_port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.fileno()
        )
        listener.detach()  # the store closes it
    return store


LOOPBACK: Final = "127.0.0.1"


def innermost(store: Store) -> Store:
    """Return the store that keeps what others put names before."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def publish_host(store: Store, key: str, rank: int) -> None:
    """Publish the address from which this rank connects to the store."""
    inner = innermost(store)
    if isinstance(inner, TCPStore):
        store.set(f"{key}/{rank}", _source_of(inner.host, inner.port))


def find_host(store: Store, key: str, rank: int, size: int) -> str:
    """Return the address of this host that the other ranks reach; all of them have published theirs.

    It is the one that leads to the store. The store's own host may take its name for loopback (Debian writes
    "127.0.1.1 name" into /etc/hosts), so there it is the one that leads to a rank of another host. Loopback where all
    ranks are on one host.
    """
    inner = innermost(store)
    if not isinstance(inner, TCPStore):
        return LOOPBACK
    own = store.get(f"{key}/{rank}").decode()
    if not ip_address(own).is_loopback:
        return own
    others = (host.decode() for host in store.multi_get([f"{key}/{each}" for each in range(size)]))
    far = next((host for host in others if not ip_address(host).is_loopback), None)
    return own if far is None else _source_of(far, inner.port)


def _source_of(host: str, port: int) -> str:
    """Return the address of this host from which it goes there."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing for a datagram socket: it only picks the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"no way leads from this host to {host}: {error.strerror}; check the network") from error


LEAVE_FAILED_S: Final = 5.0
"""Time for which rank 0 keeps the control server open when it leaves with an error, so that all ranks are notified."""


class World:
    """All processes of a run. `join_world` makes it; as a context manager it is left at the end.

    Leaving well waits until every rank has come to leave, or has failed; so no rank closes its connections under
    another's last call. Leaving with an error notifies the other ranks, whose calls with this one then raise.

    Attributes:
        rank: of this process.
        size: how many processes.
        device: where this process computes.
        deadline_s: the default of every wait.
        store: what the processes share, on a connection of the world's own.
        host: the address of this host under which the other ranks reach this one; loopback where all are on it.
    """

    def __init__(
        self, rank: int, size: int, device: Device, deadline_s: float, store: Store, *, host: str, owned: bool
    ) -> None:
        self.rank, self.size, self.device, self.deadline_s = rank, size, device, deadline_s
        self.store, self.host = store, host
        self.client: ControlClient | None = None
        self._server: ControlServer | None = None
        self._owned = owned
        self._left = False
        self._pid = os.getpid()  # a forked child runs the exit handlers too, and must not leave for its parent
        self._meshes = count()
        _joined.append(self)
        # By a weak reference: what is registered would keep a world to the end of the process.
        atexit.register(_leave_at_exit, weakref.ref(self))

    def open_client(self, key: str) -> None:
        """Start the control server on rank 0, publish its address in the store, and connect to it.

        Raises:
            DeadlineError: rank 0 opens none, it cannot be reached, or other ranks do not connect to it.
            PeerFailedError: rank 0 has ended, or a rank that had connected.
        """
        if self.rank == 0:
            token = secrets.token_hex(16)
            self._server = ControlServer(self.host, token, self.size)
            self.store.set(key, f"{self._server.address[0]} {self._server.address[1]} {token}")
        try:
            server_host, server_port, token = self.store.get(key).decode().split()
        except DistError as error:
            advice = "it was lost while all were joining; see its log"
            raise DeadlineError("join_world", "rank 0's control server", self.deadline_s, advice) from error
        self.client = ControlClient(self.rank, (server_host, int(server_port)), token, self.deadline_s)

    def count_mesh(self) -> int:
        """Return a number for a new mesh: all processes make their meshes in one order, so it is the same on all."""
        return next(self._meshes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the world; the second time is without effect.

        Args:
            error: why, when it is a failure: the other ranks' calls with this one raise `PeerFailedError` with it.

        Raises:
            DeadlineError: leaving well, and another rank does not come to leave.
        """
        if self._left:
            return
        # Before the groups are destroyed: no rank closes its connections under another's last call.
        missing = self._part(error) if self.client is not None else set()
        self.abandon()
        if missing and error is None:
            ranks = ", ".join(map(str, sorted(missing)))
            raise DeadlineError(
                "World.leave", f"rank {ranks}", self.deadline_s, "does it still compute, or is it stuck?"
            )

    def abandon(self) -> None:
        """Leave without a word to the other ranks and without waiting for them, so that this process can join anew.

        For all that are left where one has died, once no call of theirs is under way: see `interrupt_calls`.
        """
        if self._left:
            return
        self._left = True
        _joined.remove(self)
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()
        self._close()

    def _part(self, error: BaseException | None) -> set[int]:
        """Announce that this rank leaves; return the ranks that did not."""
        assert self.client is not None
        others = set(range(self.size)) - {self.rank}
        if error is not None:
            self.client.post(Record.of(error, self.rank))
        self.client.leave()
        patience_s = self.deadline_s if error is None else LEAVE_FAILED_S
        # With an error rank 0 alone waits: the others learn of it through its control server.
        if error is None or self._server is not None:
            self.client.wait_until(lambda: others <= self._over(), patience_s)
        server_is_lost = self.client.closed  # with rank 0: no message can arrive any more
        return set() if server_is_lost else others - self._over()

    def _over(self) -> set[int]:
        """Ranks that will come to no further call."""
        assert self.client is not None
        return {record.rank for record in self.client.records if not record.group}  # else only that group has ended

    def _close(self) -> None:
        if self.client is not None:
            self.client.close()
        if self._server is not None:
            self._server.close()

    def part_at_exit(self) -> None:
        """Announce the end of a process that has not called `leave`, with its error, and do not wait."""
        if self._left or self._pid != os.getpid() or self.client is None:
            return
        error = getattr(sys, "last_value", None)  # set by the interpreter for the error that ended the program
        if error is not None and not isinstance(error, SystemExit):
            self.client.post(Record.of(error, self.rank))
        self.client.leave()
        self._close()


def current_world() -> World | None:
    """Return the world this process has joined and not left."""
    return _joined[-1] if _joined else None


_joined: list[World] = []
os.register_at_fork(after_in_child=_joined.clear)  # a child is no rank


def _leave_at_exit(world: "weakref.ref[World]") -> None:
    joined = world()
    if joined is not None:
        joined.part_at_exit()


DEADLINE_S: Final = 300.0
"""Deadline for joining, and for each call of a group unless it, its mesh or its world sets another one."""

_joins: Final[Counter[str]] = Counter()  # by store: distinguishes the keys of one join from those of the next


def join_world(
    *,
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    store: Store | None = None,
    device: str | Device = "auto",
    deadline_s: float = DEADLINE_S,
) -> World:
    """Join the other processes of the run; all of them call this.

    Without arguments: over torch's default process group if there is one (which is then not ours to destroy), else
    from torchrun's environment, else alone as a world of one process.

    Args:
        rank: this process's number; with `address` or `store`.
        size: how many processes there are.
        address: "host:port" that rank 0 opens and the others can reach.
        store: a torch store that all processes share, instead of an address.
        device: "auto", a kind, a kind with an index, or an open device; a kind takes the index LOCAL_RANK.
        deadline_s: for joining, and the default of every later wait.

    Raises:
        ConfigError: arguments that do not belong together, a rank given twice, a world joined already.
        DeadlineError: ranks that did not come, by number; or no process at the address; or the store was lost.
        PeerFailedError: a rank ended while all were joining.
    """
    if _joined:
        raise ConfigError(
            f"this process is rank {_joined[-1].rank} of a world already; leave it before joining another"
        )
    place = None if isinstance(device, str) else device
    opened = place or open_device(_with_local_index(str(device)))
    adopted = dist.is_initialized()
    if adopted:
        if any(given is not None for given in (rank, size, address, store)):
            raise ConfigError(
                "torch.distributed already defines the world: call join_world() without rank, size, address and store"
            )
        rank, size, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
        store = _own(store)  # theirs keeps its timeout
    else:
        rank, size, store = _rendezvous(rank, size, address, store, deadline_s)
    try:
        return _enter(store, rank, size, opened, deadline_s, adopted=adopted)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        advice = f"it was lost while all were joining: {_first_line(error)}"
        raise DeadlineError("join_world", "the store", deadline_s, advice) from error


def _enter(store: Store, rank: int, size: int, device: Device, deadline_s: float, *, adopted: bool) -> World:
    """Meet the others at the store, and connect to them."""
    store.set_timeout(timedelta(seconds=deadline_s))
    prefix = f"offbeat/world/{_count_join(store)}"
    publish_host(store, f"{prefix}/host", rank)
    _meet(store, prefix, rank, size, deadline_s)
    host = find_host(store, f"{prefix}/host", rank, size)
    own = _own(store)  # before there is anything to undo
    if not adopted:
        _open_default_group(store, rank, size, device, deadline_s)
    world = World(rank, size, device, deadline_s, own, host=host, owned=not adopted)
    if size > 1:
        try:
            world.open_client(f"{prefix}/control")
        except BaseException as error:
            world.leave(error)  # the caller does not have it, so cannot leave it
            raise
    return world


def _count_join(store: Store) -> int:
    """Return how often this process has joined over the store before; ranks do so equally often."""
    inner = innermost(store)
    place = f"{inner.host}:{inner.port}" if isinstance(inner, TCPStore) else str(getattr(inner, "path", ""))
    _joins[place] += 1
    return _joins[place]


def _own(store: Store) -> Store:
    """Return the same store on a connection of its own: a wait on it leaves the other one free."""
    own: Store = store.clone()  # type: ignore[attr-defined]  # of torch, untyped
    return own


def backends(device: Device) -> str:
    """torch.distributed's backend for tensors on the device and, for plain data, on the CPU."""
    if device.collective_backend == "gloo":
        return "gloo"
    return f"cpu:gloo,{device.torch_device.type}:{device.collective_backend}"


def _with_local_index(device: str) -> str:
    """Return the device of this process: a kind alone takes the index that torchrun gives it on its host."""
    kind = next(iter(available_devices()), device) if device == "auto" else device
    local_rank = os.environ.get("LOCAL_RANK", "")
    several = available_devices().get(kind, 0) > 1
    return f"{kind}:{local_rank}" if several and local_rank else device


def _rendezvous(
    rank: int | None, size: int | None, address: str | None, store: Store | None, deadline_s: float
) -> tuple[int, int, Store]:
    """Rank, size, and a store that all processes share."""
    if rank is None and size is None and address is None and store is None:
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return 0, 1, HashStore()
        return _from_environment(deadline_s)
    if rank is None or size is None or (address is None) == (store is None):
        raise ConfigError(
            "join_world needs rank, size, and one of address and store, or none of them under torchrun: "
            f"got rank={rank}, size={size}, address={address}, store={store}"
        )
    if not 0 <= rank < size:
        raise ConfigError(f"a rank must lie in 0 to size - 1: got rank {rank} of {size}")
    return rank, size, store or _open_store(str(address), rank, size, deadline_s)


def _from_environment(deadline_s: float) -> tuple[int, int, Store]:
    where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=deadline_s)))
    except ValueError as error:
        raise ConfigError(f"torchrun's environment is not complete: {error}") from error
    except dist.DistError as error:
        raise DeadlineError("join_world", f"the store at {where}", deadline_s, _first_line(error)) from error
    return rank, size, store


def _open_store(address: str, rank: int, size: int, deadline_s: float) -> Store:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f'an address must read "host:port", such as "127.0.0.1:29500": got {address!r}')
    try:
        if rank == 0:
            return open_store(host.strip("[]"), int(port), deadline_s=deadline_s)
        timeout = timedelta(seconds=deadline_s)
        # Not here, but in `_meet`, are the others waited for: it names those that do not come.
        return TCPStore(host, int(port), size, is_master=False, timeout=timeout, wait_for_workers=False)
    except (OSError, dist.DistError, OverflowError) as error:
        if rank == 0:
            raise ConfigError(f"rank 0 cannot open {address}: {_first_line(error)}; choose another port") from error
        on = f"rank 0 at {address}"
        raise DeadlineError("join_world", on, deadline_s, f"has it started? {_first_line(error)}") from error


def _meet(store: Store, prefix: str, rank: int, size: int, deadline_s: float) -> None:
    """Wait for all ranks, and name those that do not come."""
    if store.add(f"{prefix}/joined/{rank}", 1) != 1:
        raise ConfigError(f"two processes joined as rank {rank} of {size}; each needs a rank of its own")
    try:
        store.wait([f"{prefix}/joined/{each}" for each in range(size)], timedelta(seconds=deadline_s))
    except dist.DistError as error:
        missing = _missing(store, prefix, size)
        advice = "have they started, with the same size and address?" if missing else _first_line(error)
        raise DeadlineError("join_world", missing or "the store", deadline_s, advice) from error


def _missing(store: Store, prefix: str, size: int) -> str:
    try:
        ranks = [each for each in range(size) if not store.check([f"{prefix}/joined/{each}"])]
    except dist.DistError:  # the store is gone, with the process that held it
        return ""
    return f"rank {', '.join(map(str, ranks))} of {size}" if ranks else ""


def _open_default_group(store: Store, rank: int, size: int, device: Device, deadline_s: float) -> None:
    backend = backends(device)
    device_id = None
    if backend != "gloo":
        torch.accelerator.set_device_index(device.torch_device)
        device_id = device.torch_device
    timeout = timedelta(seconds=deadline_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device_id)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
