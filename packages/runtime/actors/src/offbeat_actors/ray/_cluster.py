"""Finds a Ray cluster or starts one, within a deadline, and reads what its nodes have free."""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from offbeat_actors._spec import ClusterConfig
from offbeat_core import INSTALL_LINES, BackendError, ConfigError, DeadlineError
from offbeat_placement import Node, local_node

LOCAL: Final = "local"
_ADVICE: Final = (
    "is a Ray of this version there, and are RAY_AUTH_MODE and the token (RAY_AUTH_TOKEN_PATH) what its nodes have?"
)
_SLICE_S: Final = 0.1
"""Slice of the wait for a connection, so that a caller that is interrupted meanwhile does not wait for its end."""
_END_S: Final = 30.0
"""Time for Ray to end the processes of a cluster of our own; they die with this one in any case."""


class Connection:
    """The connection of this process to Ray, which knows one cluster at a time.

    Args:
        config: names the cluster. A connection that other code has made in this process is used, and left as it is.
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
    def head(self) -> str:
        """host:port of the head."""
        return str(self.ray.get_runtime_context().gcs_address)

    @property
    def own_node(self) -> str:
        """Ray's id of the node this process is on."""
        return str(self.ray.get_runtime_context().get_node_id())

    def nodes(self) -> dict[str, Node]:
        """Return the living nodes by Ray's id. Ray knows how many devices are free, and which when it gives them."""
        alive = [node for node in self.ray.nodes() if node["Alive"]]
        kinds = self.ray.get_runtime_context().get_accelerator_ids().keys()
        free = self.ray._private.state.available_resources_per_node()
        addresses = [node["NodeManagerAddress"] for node in alive]
        return {node["NodeID"]: _read_node(node, free.get(node["NodeID"], {}), kinds, addresses) for node in alive}


def cluster_nodes(config: ClusterConfig) -> list[Node]:
    """Return the machines of a Ray cluster, and what is free there now.

    This machine where the run starts its own cluster.

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

    A thread, because ray.init knows no deadline, and never returns for an address without a server. It stays, because
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


SHARED_CPUS: Final = 1024
"""CPUs that a cluster of our own says it has: its roles share the CPUs of this machine, as they do without Ray."""
_STORE_BYTES: Final = 256 << 20
"""Object store of a cluster of our own: messages are cut in pieces of 4 MiB, so it never has to hold much."""
_FOLDER_PREFIX: Final = "offbeat-ray-"  # short: Ray puts sockets into it, whose paths end at 107 bytes
_HELD: Final = "held"
_TOO_SLOW: Final = "timed out during startup"
_LOOPBACK_SWITCH: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_TOKEN: Final = secrets.token_hex(32)
"""Opens a cluster of our own; one for each process, which Ray remembers."""


def start_own_cluster(ray: Any, folder: Path, overlaps: Callable[[], bool], **options: Any) -> None:
    """Start a cluster that other users cannot reach, and connect to it.

    Without a token every user of this machine could run code in it. Ray asks for one by itself (Ray 2.60,
    ray/_private/authentication), but would keep one for all clusters in a file of the home folder.

    Args:
        ray: the module.
        folder: takes Ray's files.
        overlaps: whether to try again when Ray gives up: it allows its own processes 30 s, also on a busy machine.
        options: more arguments of `ray.init`.
    """
    with loopback_only(ray), _kept("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        os.environ["RAY_AUTH_TOKEN"] = _TOKEN
        while not _try_start(ray, folder, overlaps, options):
            pass


def _try_start(ray: Any, folder: Path, overlaps: Callable[[], bool], options: Mapping[str, Any]) -> bool:
    try:
        ray.init(
            address="local",
            num_cpus=SHARED_CPUS,
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            _temp_dir=str(folder),
            # Workers started ahead would compete with the roles for the CPUs while these load their models.
            _system_config={"prestart_worker_first_driver": False},
            **options,
        )
    except Exception as error:  # the only one that Ray raises for it
        if _TOO_SLOW not in str(error) or not overlaps():
            raise
        ray.shutdown()
        return False
    return True


def own_accelerators(ray: Any) -> dict[str, tuple[int, ...]]:
    """Accelerators that a cluster of our own will have: those that Ray finds on this machine when it starts one.

    Source: Ray 2.60, ray/_private/resource_and_label_spec.py, ResourceAndLabelSpec.resolve.
    """
    spec = ray._private.resource_and_label_spec.ResourceAndLabelSpec
    manager, number = spec._get_current_node_accelerator(None, {})
    return {manager.get_resource_name(): tuple(range(number))} if number else {}


@contextlib.contextmanager
def own_folder(parent: Path) -> Iterator[Path]:
    """A folder for the sockets and logs of Ray, removed after the block; and so are those that killed runs have left.

    A run that lives holds a lock on its folder, which the kernel lets go of with the process, however it ends.
    """
    for left in parent.glob(f"{_FOLDER_PREFIX}*"):
        _remove_if_left(left)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent))
    try:
        with (folder / _HELD).open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_left(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / _HELD).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: a living run holds it
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def loopback_only(ray: Any) -> Iterator[None]:
    """Have Ray take 127.0.0.1 as the address of this machine, so that all its servers listen there alone.

    Expected: `ray.init(address="local", _node_ip_address="127.0.0.1")` does that. What happens: Ray replaces loopback
    addresses by that of the network, and its servers listen on all interfaces (`resolve_ip_for_localhost` in
    ray/_private/services.py, Ray 2.60); given `address="127.0.0.1:..."` of a cluster on loopback, it waits for ever.
    The switch is the one that keeps Ray on loopback on other systems. To go when Ray takes such an address at its word.
    """
    constants = ray._private.ray_constants
    enabled = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        with _kept(_LOOPBACK_SWITCH):
            os.environ[_LOOPBACK_SWITCH] = "0"
            yield
    finally:
        constants.ENABLE_RAY_CLUSTER = enabled


@contextlib.contextmanager
def _kept(*names: str) -> Iterator[None]:
    """Give environment variables their values back after the block: what the driver starts shall not inherit them."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


_OLDEST: Final = (2, 60)
_QUIET: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise Ray has every worker started anew by `uv run` when the driver was.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


def check_ray_installed() -> None:
    """See whether Ray is here, without importing it.

    Raises:
        BackendError: it is not, with the install line.
    """
    if find_spec("ray") is None:
        raise _not_installed()


def _not_installed() -> BackendError:
    line = INSTALL_LINES["offbeat.launcher", "ray"]
    return BackendError(f'cluster.launcher = "ray" needs Ray, which is not installed; install it with: {line}')


def import_ray() -> Any:
    """Return the module, with everything that this package uses of it.

    Raises:
        BackendError: it is not installed, with the install line, or too old.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    line = INSTALL_LINES["offbeat.launcher", "ray"]
    try:
        ray = import_module("ray")
        import_module("ray.util.scheduling_strategies")
        import_module("ray.exceptions")
    except ImportError as error:
        raise _not_installed() from error
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < _OLDEST:
        raise BackendError(f"needs Ray {_OLDEST[0]}.{_OLDEST[1]} or newer, got {ray.__version__}: {line}")
    return ray
