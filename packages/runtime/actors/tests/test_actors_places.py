"""A launcher knows where each role is and what its process does, from its place in a plan to its end."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Launchers
from ray_cluster import NUM_GPUS, RayCluster

from offbeat_actors import ClusterConfig, Launcher, RoleSpec
from offbeat_actors.ray import RayLauncher, cluster_nodes
from offbeat_core import DeadlineError, RoleName
from offbeat_placement import RankGroup, plan_placement


def states(launcher: Launcher) -> dict[str, str]:
    return {str(place.role): place.state for place in launcher.places()}


async def until(launcher: Launcher, role: str, state: str) -> None:
    end_s = time.monotonic() + 60
    while states(launcher).get(role) != state:
        assert time.monotonic() < end_s, launcher.places()
        await asyncio.sleep(0.02)


def test_a_role_is_starting_then_ready_then_ended_with_the_reason(
    launchers: Launchers, role_env: dict[str, str], tmp_path: Path
) -> None:
    def spec(name: str, target: str) -> RoleSpec:
        return RoleSpec(RoleName.parse(name), f"actor_roles:{target}", env=role_env, log_path=tmp_path / f"{name}.log")

    async def scenario() -> None:
        async with launchers.make() as launcher:
            assert launcher.places() == []
            actor = await launcher.start(spec("rollout-0", "Patient"), deadline_s=launchers.start_s)
            [place] = launcher.places()
            assert (str(place.role), place.pid, place.state) == ("rollout-0", actor.pid, "ready")
            assert abs(time.time() - place.since_s) < 60
            never = asyncio.create_task(launcher.start(spec("rollout-1", "NeverReady"), deadline_s=3))
            await until(launcher, "rollout-1", "starting")
            actor.kill()
            await actor.wait_dead()
            first = launcher.places()[0]
            assert first.state == "ended"
            assert "SIGKILL" in first.reason
            assert first.since_s >= place.since_s
            with pytest.raises(DeadlineError):
                await never
            assert states(launcher) == {"rollout-0": "ended", "rollout-1": "ended"}
            again = await launcher.start(spec("rollout-0", "Patient"), deadline_s=launchers.start_s)
            assert launcher.places()[0].pid == again.pid != place.pid

    asyncio.run(scenario())


@pytest.mark.timeout(400)
def test_a_place_names_the_node_and_the_devices_that_ray_has_given(
    ray_cluster: RayCluster, role_env: dict[str, str], tmp_path: Path
) -> None:
    """An engine on two whole nodes holds devices of both; its process is on the first."""
    groups = [RankGroup(role="rollout", tensor_parallel=2 * NUM_GPUS, process_per_replica=True, spans_nodes=True)]
    config = ClusterConfig(launcher="ray", address=ray_cluster.address)

    async def scenario() -> dict[str, Any]:
        async with RayLauncher("test-run", config) as launcher:
            await launcher.place(plan_placement(cluster_nodes(config), groups), groups)
            [placed] = launcher.places()
            assert (placed.state, placed.pid) == ("placed", 0)
            spec = RoleSpec(
                RoleName("rollout"), "actor_roles:Patient", env=role_env, log_path=tmp_path / "rollout-0.log"
            )
            actor = await launcher.start(spec)
            [place] = launcher.places()
            assert (place.node, place.pid) == (actor.address, actor.pid)
            seen = await actor.call("visible_devices", returns=list[str], deadline_s=30)
            assert list(place.devices[place.node]) == [f"GPU {device}" for device in seen]
            return dict(place.devices)

    held = asyncio.run(scenario())
    assert {node: len(devices) for node, devices in held.items()} == {"127.0.0.2": NUM_GPUS, "127.0.0.3": NUM_GPUS}
