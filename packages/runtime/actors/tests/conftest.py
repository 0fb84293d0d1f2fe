"""What the cluster tests share. A test that asks for `launchers` or `start_role` runs on every launcher."""

import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside it

from ray_cluster import RayCluster, SharedHomeLauncher, connected_nodes
from role_processes import MARK

from offbeat_actors import ActorHandle, ClusterConfig, LocalLauncher, RoleSpec
from offbeat_core import RoleName

StartRole = Callable[..., AbstractAsyncContextManager[ActorHandle]]


@dataclass
class Launchers:
    """Makes launchers of one kind.

    Args:
        kind: its name, as in `cluster.launcher`.
        place: how its errors say where a process was.
        make: a launcher with settings of `ClusterConfig`.
        start_s: for a role to start. Ray starts a worker before its first role, and its nodes took 44 s instead of 11
            to start beside four busy processes.
        address: of the cluster.
    """

    kind: str
    place: str
    make: Callable[..., Any]
    start_s: float
    address: str = "local"


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """Two nodes of 8 accelerators, and a head without."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'offbeat-actors[ray]'")
    with connected_nodes(2) as cluster:
        yield cluster


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.timeout(400))])
def launchers(request: pytest.FixtureRequest) -> Launchers:
    """Each kind of launcher in turn."""
    if request.param == "local":
        return Launchers("local", "", lambda **settings: LocalLauncher("test-run", ClusterConfig(**settings)), 60)
    cluster: RayCluster = request.getfixturevalue("ray_cluster")
    place = f" on {cluster.ray.util.get_node_ip_address()}"

    def make(**settings: Any) -> SharedHomeLauncher:
        return SharedHomeLauncher(cluster, ClusterConfig(launcher="ray", address=cluster.address, **settings))

    return Launchers("ray", place, make, 240, cluster.address)


# For a test that takes seconds on each launcher and whose subject does not depend on which.
ray_at_night = pytest.mark.parametrize(
    "launchers", ["local", pytest.param("ray", marks=[pytest.mark.nightly, pytest.mark.timeout(400)])], indirect=True
)


@pytest.fixture
def role_env(tmp_path: Path) -> dict[str, str]:
    """Environment of every role of a test: it finds actor_roles.py, and is found by `role_processes`."""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), MARK: str(tmp_path)}


@pytest.fixture
def start_role(tmp_path: Path, role_env: dict[str, str], launchers: Launchers) -> StartRole:
    """Start a role of actor_roles.py that logs to tmp_path/NAME.log, and stop it after the block."""

    @asynccontextmanager
    async def start(
        target: str, kwargs: Mapping[str, Any] | None = None, *, name: str = "rollout-0", **options: Any
    ) -> AsyncIterator[ActorHandle]:
        spec = RoleSpec(
            RoleName.parse(name),
            f"actor_roles:{target}",
            kwargs or {},
            env={**role_env, **options.pop("env", {})},
            log_path=tmp_path / f"{name}.log",
            **options,
        )
        async with launchers.make() as launcher:
            yield await launcher.start(spec, deadline_s=launchers.start_s)

    return start
