"""A Ray cluster of the run's own: on loopback alone, behind a token of its own, its files gone with it."""

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

SHARED_CPUS: Final = 1024
"""What a cluster of our own says it has: its roles share the CPUs of this machine, as they do without Ray."""
_STORE_BYTES: Final = 256 << 20
"""Object store of a cluster of our own: messages are cut in pieces of 4 MiB, so it never has to hold much."""
_FOLDER_PREFIX: Final = "offbeat-ray-"  # short: Ray puts sockets into it, whose paths end at 107 bytes
_HELD: Final = "held"
_TOO_SLOW: Final = "timed out during startup"
_LOOPBACK_SWITCH: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_TOKEN: Final = secrets.token_hex(32)
"""Opens a cluster of our own; one for each process, which Ray remembers."""


def start_own_cluster(ray: Any, folder: Path, goes_on: Callable[[], bool], **options: Any) -> None:
    """Start a cluster that nobody else can reach, and connect to it.

    Without a token every user of this machine could run code in it. Ray asks for one by itself (Ray 2.60,
    ray/_private/authentication), but would keep one for all clusters in a file of the home folder.

    Args:
        ray: the module.
        folder: takes Ray's files.
        goes_on: whether to try again when Ray gives up: it allows its own processes 30 s, also on a busy machine.
        options: more arguments of `ray.init`.
    """
    with loopback_only(ray), _kept("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        os.environ["RAY_AUTH_TOKEN"] = _TOKEN
        while not _try_start(ray, folder, goes_on, options):
            pass


def _try_start(ray: Any, folder: Path, goes_on: Callable[[], bool], options: Mapping[str, Any]) -> bool:
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
        if _TOO_SLOW not in str(error) or not goes_on():
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
