"""What the cluster tests share."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from offbeat_cluster import ActorHandle, LocalLauncher, RoleSpec

StartRole = Callable[..., AbstractAsyncContextManager[ActorHandle]]


@pytest.fixture
def roles_folder() -> str:
    """Folder of cluster_roles.py, for PYTHONPATH."""
    return str(Path(__file__).parent)


@pytest.fixture
def start_role(tmp_path: Path, roles_folder: str) -> StartRole:
    """Start a role of cluster_roles.py that logs to tmp_path/NAME.log, and stop it after the block."""

    @asynccontextmanager
    async def start(
        target: str, kwargs: Mapping[str, Any] | None = None, *, name: str = "rollout-0", **options: Any
    ) -> AsyncIterator[ActorHandle]:
        spec = RoleSpec(
            name,
            f"cluster_roles:{target}",
            kwargs or {},
            env={"PYTHONPATH": roles_folder, **options.pop("env", {})},
            log_path=tmp_path / f"{name}.log",
            **options,
        )
        async with LocalLauncher("test-run") as launcher:
            yield await launcher.start(spec, deadline_s=30)

    return start
