"""Finds a Ray cluster or starts one, within a deadline, and reads what its nodes have free."""

import contextlib
import socket
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from offbeat_actors._specs import ClusterConfig
from offbeat_actors.ray._import import import_ray
from offbeat_actors.ray._own_cluster import (
    SHARED_CPUS,
    loopback_only,
    own_accelerators,
    own_folder,
    start_own_cluster,
)
from offbeat_placement import Node, local_node
from offbeat_types import BackendError, ConfigError, DeadlineError

LOCAL: Final = "local"
_ADVICE: Final = (
    "is a Ray of this version there, and are RAY_AUTH_MODE and the token (RAY_AUTH_TOKEN_PATH) what its nodes have?"
)
_SLICE_S: Final = 0.1
"""Of the wait for a connection: who is interrupted meanwhile does not wait for its end."""
_END_S: Final = 30.0
"""For Ray to end the processes of a cluster of our own; they die with this one in any case."""


class Connection:
    """The connection of this process to Ray, which knows one cluster at a time.

    Args:
        config: names the cluster. A connection that somebody else has made in this process is used, and left as it is.
        given_up: ends the wait for a connection once it is set.

    Attributes:
        address: IP address of this machine, as the other nodes see it.

    Raises:
        BackendError: Ray is not installed, or the wait for it was given up.
        ConfigError: nothing answers at the address, or this process is connected to another cluster.
        DeadlineError: no connection in `connect_timeout_s`.
    """

    def __init__(self, config: ClusterConfig, given_up: threading.Event | None = None) -> None:
        self.ray = import_ray()
        self._owner: _Owner | None = None
        if self.ray.is_initialized():
            _check_same(self.ray, config.address)
        else:
            self._owner = _Owner(self.ray, config)
            self._owner.connect(given_up or threading.Event())
        self.address = str(self.ray.util.get_node_ip_address())

    def close(self) -> None:
        """Disconnect, and end a cluster of our own."""
        if self._owner is not None:
            self._owner.disconnect()

    @property
    def own_node(self) -> str:
        """Ray's id of the node this process is on."""
        return str(self.ray.get_runtime_context().get_node_id())

    def nodes(self) -> dict[str, Node]:
        """The living nodes by Ray's id. Ray knows how many devices are free, and which only once it gives them."""
        alive = [node for node in self.ray.nodes() if node["Alive"]]
        kinds = self.ray.get_runtime_context().get_accelerator_ids().keys()
        free = self.ray._private.state.available_resources_per_node()
        addresses = [node["NodeManagerAddress"] for node in alive]
        return {node["NodeID"]: _read_node(node, free.get(node["NodeID"], {}), kinds, addresses) for node in alive}


def cluster_nodes(config: ClusterConfig) -> list[Node]:
    """The machines of a Ray cluster, and what is free there now; this machine where the run starts its own cluster.

    Raises:
        BackendError: Ray is not installed.
        ConfigError: nothing answers at `cluster.address`.
        DeadlineError: no connection in `connect_timeout_s`.
    """
    if config.address == LOCAL and not (ray := import_ray()).is_initialized():
        return [replace(local_node(), num_cpus=SHARED_CPUS, free=own_accelerators(ray))]
    connection = Connection(config)
    try:
        return list(connection.nodes().values())
    finally:
        connection.close()


def _read_node(node: dict[str, Any], free: dict[str, float], kinds: Any, addresses: list[str]) -> Node:
    address = node["NodeManagerAddress"]
    held = {kind: int(node["Resources"].get(kind, 0)) for kind in kinds}
    return Node(
        name=address if addresses.count(address) == 1 else f"{address}/{node['NodeID'][:8]}",
        address=address,
        free={kind: tuple(range(int(free.get(kind, 0)))) for kind in kinds},
        total={kind: num for kind, num in held.items() if num},
        num_cpus=free.get("CPU", 0.0),
        memory_bytes=free.get("memory", 0.0),
    )


def _check_same(ray: Any, address: str) -> None:
    connected = ray.get_runtime_context().gcs_address
    if address != LOCAL and address.rpartition(":")[2] != connected.rpartition(":")[2]:
        raise ConfigError(
            f"cluster.address = {address!r}, but this process is connected to the Ray cluster at {connected}: "
            "a process has one at a time"
        )


class _Owner(threading.Thread):
    """Calls ray.init, and stays until the connection is closed.

    A thread, because ray.init knows no deadline, and for an address where nobody is it never returns. It stays, because
    the processes of a cluster of our own die with the thread that has started them (PR_SET_PDEATHSIG).
    """

    def __init__(self, ray: Any, config: ClusterConfig) -> None:
        super().__init__(name="ray.init", daemon=True)
        self._ray, self._config = ray, config
        self._connected, self._closing = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    def connect(self, given_up: threading.Event) -> None:
        """Connect within the deadline: see `Connection`."""
        address, deadline_s = self._config.address, self._config.connect_timeout_s
        if address != LOCAL:
            _check_listening(address, deadline_s)
        self.start()
        end_s = time.monotonic() + deadline_s
        while not self._connected.wait(_SLICE_S) and time.monotonic() < end_s and not given_up.is_set():
            pass
        if not self._connected.is_set():
            self._closing.set()  # should it ever come up
            if given_up.is_set():
                raise BackendError("the launcher was closed while it connected to Ray")
            on, advice = "a Ray cluster of our own", "raise cluster.connect_timeout_s: this machine is busy"
            if address != LOCAL:
                on, advice = f"the Ray cluster at {address}", f"{_ADVICE} or raise cluster.connect_timeout_s"
            raise DeadlineError("connecting to Ray", on, deadline_s, advice)
        if self._error:
            advice = "" if address == LOCAL else f"; {_ADVICE}"
            raise ConfigError(f"cluster.address = {address!r}: Ray says: {self._error}{advice}") from self._error

    def disconnect(self) -> None:
        """Disconnect, which ends a cluster of our own."""
        self._closing.set()
        self.join(_END_S)

    def run(self) -> None:
        """Be the thread."""
        is_own = self._config.address == LOCAL
        with own_folder(Path(tempfile.gettempdir())) if is_own else contextlib.nullcontext() as folder:
            try:
                self._init(folder)
            except Exception as error:  # noqa: BLE001  the boundary to Ray, whose errors have no common base here
                self._error = error
                self._closing.set()
            finally:
                self._connected.set()
            self._closing.wait()
            self._ray.shutdown()

    def _init(self, folder: Path | None) -> None:
        address = self._config.address
        if folder is not None:
            start_own_cluster(self._ray, folder, lambda: not self._closing.is_set(), **_quiet())
            return
        with loopback_only(self._ray) if _is_loopback(address) else contextlib.nullcontext():
            self._ray.init(address=address, **_quiet())


def _check_listening(address: str, deadline_s: float) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"cluster.address is host:port of the head of a Ray cluster, or local: got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=deadline_s).close()
    except OSError as error:
        raise ConfigError(
            f"cluster.address = {address!r}: nothing answers there ({error}); start one with "
            f'`ray start --head --node-ip-address=HOST --port=PORT`, or set cluster.address = "local"'
        ) from error


def _quiet() -> dict[str, Any]:
    return {"log_to_driver": False, "logging_level": "error"}


def _is_loopback(address: str) -> bool:
    return address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")
