"""The store where ranks find each other, listening at one address alone."""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore


def open_store(host: str, port: int = 0, *, deadline_s: float = 300.0) -> TCPStore:
    """Open a store that can be reached at `host` and nowhere else.

    Expected: `TCPStore(host, ...)` listens on that address. What happens: it listens on all, whatever the host (torch
    2.13, TCPStoreLibUvBackend.cpp), so that anybody in the network reads and writes what ranks tell each other. But it
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
