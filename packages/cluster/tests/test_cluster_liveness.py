"""Calls to roles are edges in the graph of who waits for whom, on every launcher."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Launchers

from offbeat_cluster import RoleSpec


@pytest.mark.skipif(sys.platform != "linux", reason="processes meet through /proc and a folder")
def test_a_circle_of_waits_through_calls_is_named(
    launchers: Launchers, role_env: dict[str, str], tmp_path: Path
) -> None:
    liveness = pytest.importorskip("offbeat_dist.liveness", reason="offbeat-dist is not installed")
    folder = tmp_path / "liveness"
    spec = RoleSpec("trainer-0", "cluster_roles:Watched", {"name": "trainer-0", "folder": folder}, env=role_env)

    async def scenario() -> Any:
        found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        monitor = liveness.watch(
            stall_after_s=2,
            directory=folder,
            name="driver",
            on_verdict=lambda verdict: loop.call_soon_threadsafe(_once(found), verdict),
        )
        try:
            async with launchers.make() as launcher:
                trainer = await launcher.start(spec, deadline_s=90)
                update = asyncio.create_task(trainer.call("wait_for", "prompts.get", "driver", deadline_s=1000))
                async with asyncio.timeout(90):
                    verdict = await found
                update.cancel()
                return verdict
        finally:
            monitor.close()

    verdict = asyncio.run(scenario())
    assert verdict.kind == "wait-cycle"
    assert "driver waits for trainer-0 in trainer-0.wait_for" in verdict.headline
    assert "trainer-0 waits for driver in prompts.get" in verdict.headline


def _once(found: "asyncio.Future[Any]") -> Callable[[Any], None]:
    return lambda verdict: None if found.done() else found.set_result(verdict)
