"""Joining the world: from torchrun's environment, from an address, from a store, or over an existing default group."""

import os
from collections import Counter
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from offbeat_mesh._device import Device, available_devices, open_device
from offbeat_mesh._hosts import find_host, innermost, tell_host
from offbeat_mesh._meeting import open_store
from offbeat_mesh._world import World, refuse_second_world
from offbeat_types import ConfigError, DeadlineError

DEADLINE_S: Final = 300.0
"""For joining, and for each call of a group unless it, its mesh or its world says otherwise."""

_joins: Final[Counter[str]] = Counter()  # by store: tells the keys of one join from those of the next


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
        DeadlineError: ranks that did not come, by number; or nobody at the address; or the store was lost.
    """
    refuse_second_world()
    place = None if isinstance(device, str) else device
    opened = place or open_device(_with_local_index(str(device)))
    adopted = dist.is_initialized()
    if adopted:
        _refuse(rank is not None or size is not None or address is not None or store is not None, "torch.distributed")
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
    tell_host(store, f"{prefix}/host", rank)
    _meet(store, prefix, rank, size, deadline_s)
    host = find_host(store, f"{prefix}/host", rank, size)
    own = _own(store)  # before there is anything to undo
    if not adopted:
        _open_default_group(store, rank, size, device, deadline_s)
    world = World(rank, size, device, deadline_s, own, host=host, owned=not adopted)
    if size > 1:
        try:
            world.open_board(f"{prefix}/hub")
        except BaseException as error:
            world.leave(error)  # nobody else has it to leave it
            raise
    return world


def _count_join(store: Store) -> int:
    """How often this process has joined over the store before; ranks do so equally often."""
    inner = innermost(store)
    place = f"{inner.host}:{inner.port}" if isinstance(inner, TCPStore) else str(getattr(inner, "path", ""))
    _joins[place] += 1
    return _joins[place]


def _own(store: Store) -> Store:
    """The same store on a connection of its own: a wait on it leaves the other one free."""
    own: Store = store.clone()  # type: ignore[attr-defined]  # of torch, untyped
    return own


def backends(device: Device) -> str:
    """torch.distributed's backend for tensors on the device and, for plain data, on the CPU."""
    if device.collective_backend == "gloo":
        return "gloo"
    return f"cpu:gloo,{device.torch_device.type}:{device.collective_backend}"


def _with_local_index(device: str) -> str:
    """A kind alone takes the index that torchrun gives this process on its host."""
    kind = next(iter(available_devices()), device) if device == "auto" else device
    local_rank = os.environ.get("LOCAL_RANK", "")
    several = available_devices().get(kind, 0) > 1
    return f"{kind}:{local_rank}" if several and local_rank else device


def _refuse(wrong: bool, what: str) -> None:
    if wrong:
        raise ConfigError(
            f"{what} already says who is in the world: call join_world() without rank, size, address and store"
        )


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
