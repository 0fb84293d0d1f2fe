"""Under which address the other ranks reach this one."""

import socket
from ipaddress import ip_address
from typing import Final

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from offbeat_types import ConfigError

LOOPBACK: Final = "127.0.0.1"


def innermost(store: Store) -> Store:
    """The store that keeps what others put names before."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def tell_host(store: Store, key: str, rank: int) -> None:
    """Tell the others by which address this rank goes to the store."""
    inner = innermost(store)
    if isinstance(inner, TCPStore):
        store.set(f"{key}/{rank}", _source_of(inner.host, inner.port))


def find_host(store: Store, key: str, rank: int, size: int) -> str:
    """The address of this host that the other ranks reach; all of them have told theirs.

    It is the one that leads to the store. The store's own host may take its name for loopback (Debian writes
    "127.0.1.1 name" into /etc/hosts), so there it is the one that leads to a rank of another host. Loopback where all
    ranks are on one host.

    Raises:
        ConfigError: nothing leads there.
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
    """The address of this host from which it goes there."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing for a datagram socket: it only picks the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"no way leads from this host to {host}: {error.strerror}; check the network") from error
