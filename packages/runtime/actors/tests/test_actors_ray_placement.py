"""Plans on a Ray cluster: every engine on its node, verified; what cannot be is refused, and nothing stays reserved."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import NUM_GPUS, RayCluster
from role_processes import parent_of
from test_actors_failures import ends, needs_linux

from offbeat_actors import ClusterConfig, RoleSpec, call_all
from offbeat_actors.ray import RayLauncher, cluster_nodes
from offbeat_core import DeadlineError, PeerFailedError, PlacementError, RoleName
from offbeat_placement import Plan, RankGroup, plan_placement

pytestmark = pytest.mark.timeout(400)  # the first test waits for the cluster; nodes take seconds to start and to end

ALL_FREE = {"127.0.0.2": NUM_GPUS, "127.0.0.3": NUM_GPUS}
NONE_FREE = dict.fromkeys(ALL_FREE, 0)


@pytest.fixture(autouse=True)
def _all_free(ray_cluster: RayCluster) -> Iterator[None]:
    """Every test finds the cluster free, and leaves it so."""
    ray_cluster.wait_free_gpus(ALL_FREE)
    yield
    assert ray_cluster.held_groups() == []
    ray_cluster.wait_free_gpus(ALL_FREE)


def engines(num: int, width: int, **more: Any) -> RankGroup:
    """Rollout engines, each one process with `width` devices."""
    return RankGroup(role="rollout", num_replicas=num, tensor_parallel=width, process_per_replica=True, **more)


def config(cluster: RayCluster, **settings: Any) -> ClusterConfig:
    return ClusterConfig(launcher="ray", address=cluster.address, **settings)


def launcher(cluster: RayCluster, **settings: Any) -> RayLauncher:
    return RayLauncher("test-run", config(cluster, **settings))


def plan(cluster: RayCluster, groups: Sequence[RankGroup]) -> Plan:
    return plan_placement(cluster_nodes(config(cluster)), groups)


def role(name: str, target: str, env: dict[str, str], log_folder: Path) -> RoleSpec:
    return RoleSpec(RoleName.parse(name), f"actor_roles:{target}", env=env, log_path=log_folder / f"{name}.log")


@contextmanager
def taken(
    cluster: RayCluster, *bundles: dict[str, float], then_free: dict[str, int] | None = ALL_FREE
) -> Iterator[None]:
    """Hold resources as another run would, and wait afterwards until so many accelerators are free."""
    tools = cluster.ray.util
    groups = [tools.placement_group([bundle], name=f"another run {each}") for each, bundle in enumerate(bundles)]
    try:
        for group in groups:
            assert group.wait(30)
        yield
    finally:
        for group in groups:
            tools.remove_placement_group(group)
        if then_free is not None:
            cluster.wait_free_gpus(then_free)


def test_every_role_sits_on_its_node_and_sees_its_own_devices(
    ray_cluster: RayCluster, role_env: dict[str, str], tmp_path: Path
) -> None:
    groups = [RankGroup(role="trainer", num_replicas=4), engines(3, 4)]
    wanted = plan(ray_cluster, groups)

    async def scenario() -> list[list[str]]:
        async with launcher(ray_cluster) as started:
            await started.place(wanted, groups)
            ray_cluster.wait_free_gpus(NONE_FREE)
            names = [*(f"trainer-{rank}" for rank in range(4)), *(f"rollout-{number}" for number in range(3))]
            roles = await asyncio.gather(*(started.start(role(name, "Patient", role_env, tmp_path)) for name in names))
            for actor in roles:
                first = next(rank for rank in wanted.ranks if actor.name == f"{rank.role}-{rank.replica}")
                assert actor.address == first.node, f"{actor.name} sits beside its first device"
            devices = await call_all(roles, "visible_devices", returns=list[str], deadline_s=30)
            return [[actor.address, *held] for actor, held in zip(roles, devices, strict=True)]

    placed = asyncio.run(scenario())
    assert [len(devices) for _, *devices in placed] == [1] * 4 + [4] * 3
    held = [(address, device) for address, *devices in placed for device in devices]
    assert len(set(held)) == len(held) == 2 * NUM_GPUS  # no device twice
    assert [devices for _, *devices in placed[:4]] == sorted(devices for _, *devices in placed[:4])


@pytest.mark.nightly
def test_colocated_roles_share_their_devices(ray_cluster: RayCluster, role_env: dict[str, str], tmp_path: Path) -> None:
    groups = [
        RankGroup(role="trainer", num_replicas=2, tensor_parallel=2),
        engines(1, 4, shares_devices_with="trainer"),
    ]

    async def scenario() -> list[list[str]]:
        async with launcher(ray_cluster) as started:
            await started.place(plan(ray_cluster, groups), groups)
            names = [*(f"trainer-{rank}" for rank in range(4)), "rollout-0"]
            roles = [await started.start(role(name, "Patient", role_env, tmp_path)) for name in names]
            return await call_all(roles, "visible_devices", returns=list[str], deadline_s=30)

    *trainers, rollout = asyncio.run(scenario())
    assert [device for devices in trainers for device in devices] == rollout


def test_an_engine_wider_than_a_node_takes_whole_nodes_when_asked(ray_cluster: RayCluster) -> None:
    groups = [engines(1, 2 * NUM_GPUS, spans_nodes=True)]

    async def scenario() -> None:
        async with launcher(ray_cluster) as started:
            await started.place(plan(ray_cluster, groups), groups)
            ray_cluster.wait_free_gpus(NONE_FREE)

    asyncio.run(scenario())
    with pytest.raises(PlacementError):
        plan(ray_cluster, [engines(1, 2 * NUM_GPUS)])


def test_what_no_single_node_has_is_refused_and_named_before_anything_waits(ray_cluster: RayCluster) -> None:
    with taken(ray_cluster, {"GPU": 2, "node:127.0.0.2": 0.01}, {"GPU": 6, "node:127.0.0.3": 0.01}):
        ray_cluster.wait_free_gpus({"127.0.0.2": 6, "127.0.0.3": 2})
        plan(ray_cluster, [engines(1, 6)])
        with pytest.raises(PlacementError, match=r"127.0.0.2[^\n]*6") as refused:
            plan(ray_cluster, [engines(1, 8)])
        assert "127.0.0.3" in str(refused.value)


@pytest.mark.nightly
def test_a_node_that_is_busy_meanwhile_is_named_at_the_deadline_and_nothing_stays_reserved(
    ray_cluster: RayCluster,
) -> None:
    groups = [engines(4, 4)]
    wanted = plan(ray_cluster, groups)  # made while all was free

    async def scenario() -> None:
        async with launcher(ray_cluster) as started:
            with pytest.raises(DeadlineError) as waited:
                await started.place(wanted, groups, deadline_s=3)
            assert str(waited.value).startswith("placing 4 blocks: waited 3 s for rollout-")
            assert "4 GPU on 127.0.0.2, which has " in waited.value.on
            assert "127.0.0.3" not in waited.value.on
            assert ray_cluster.held_groups() == ["another run 0"]

    with taken(ray_cluster, {"GPU": 1, "node:127.0.0.2": 0.01}):
        asyncio.run(scenario())


def test_a_plan_for_more_than_a_node_has_is_refused_at_once(ray_cluster: RayCluster) -> None:
    groups = [engines(1, 4, cpus_per_rank=1000)]
    nodes = [node for node in cluster_nodes(config(ray_cluster)) if node.total]
    wanted = plan_placement([_with_cpus(node) for node in nodes], groups)

    async def scenario() -> None:
        async with launcher(ray_cluster, place_timeout_s=1000) as started:
            with pytest.raises(PlacementError, match=r"has 8 CPU, needs 4000"):
                await started.place(wanted, groups)

    asyncio.run(scenario())


def _with_cpus(node: Any) -> Any:
    from dataclasses import replace

    return replace(node, num_cpus=1e6)


@pytest.mark.nightly
def test_an_engine_that_is_never_ready_is_named_within_its_deadline(
    ray_cluster: RayCluster, role_env: dict[str, str], tmp_path: Path
) -> None:
    groups = [engines(2, 4)]

    async def scenario() -> None:
        async with launcher(ray_cluster) as started:
            await started.place(plan(ray_cluster, groups), groups)
            ready = started.start(role("rollout-0", "Patient", role_env, tmp_path))
            never = started.start(role("rollout-1", "NeverReady", role_env, tmp_path), deadline_s=8)
            with pytest.raises(DeadlineError, match=r"starting rollout-1: waited 8 s for rollout-1"):
                await asyncio.gather(ready, never)

    asyncio.run(scenario())
    assert "loading the model" in (tmp_path / "rollout-1.log").read_text()


@pytest.fixture
def doomed_node(ray_cluster: RayCluster) -> Iterator[Any]:
    """A third node, at 127.0.0.9, that a test may remove."""
    node = ray_cluster.nodes.add_node(9)
    ray_cluster.nodes.wait_ready()
    ray_cluster.wait_free_gpus({**ALL_FREE, "127.0.0.9": NUM_GPUS})
    yield node
    if node in ray_cluster.nodes.cluster.worker_nodes:
        ray_cluster.nodes.cluster.remove_node(node, allow_graceful=False)


@pytest.mark.nightly
def test_a_node_lost_under_an_engine_is_named_and_the_engine_starts_again_where_there_is_room(
    ray_cluster: RayCluster, doomed_node: Any, role_env: dict[str, str], tmp_path: Path
) -> None:
    groups = [engines(4, 4)]
    nodes = [node for node in cluster_nodes(config(ray_cluster)) if node.address in ("127.0.0.3", "127.0.0.9")]
    wanted = plan_placement(nodes, groups)
    number = next(rank.replica for rank in wanted.ranks if rank.node == "127.0.0.9")
    name = f"rollout-{number}"

    async def scenario() -> None:
        async with launcher(ray_cluster) as started:
            await started.place(wanted, groups)
            actor = await started.start(role(name, "Faulty", role_env, tmp_path))
            call = asyncio.create_task(actor.call("hang", deadline_s=60))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(ray_cluster.nodes.cluster.remove_node, doomed_node, allow_graceful=False)
            with pytest.raises(PeerFailedError, match=rf"{name} failed: its node 127.0.0.9 was lost.*\n.*\nhanging"):
                await call
            assert not actor.alive
            again = role(name, "Patient", role_env, tmp_path)
            with taken(ray_cluster, {"GPU": 5, "node:127.0.0.2": 0.01}, then_free=None):
                ray_cluster.wait_free_gpus({"127.0.0.2": 3, "127.0.0.3": 0})
                with pytest.raises(PlacementError, match=r"lost its node 127.0.0.9(.|\n)*127.0.0.2, which has 3 free"):
                    await started.start(again)
            ray_cluster.wait_free_gpus({"127.0.0.2": 8, "127.0.0.3": 0})
            actor = await started.start(again)
            assert actor.address == "127.0.0.2"
            assert len(await actor.call("visible_devices", returns=list[str], deadline_s=30)) == 4

    asyncio.run(scenario())


@pytest.mark.nightly
def test_a_node_lost_while_an_engine_starts_ends_the_start(
    ray_cluster: RayCluster, doomed_node: Any, role_env: dict[str, str], tmp_path: Path
) -> None:
    groups = [engines(1, 8)]
    nodes = [node for node in cluster_nodes(config(ray_cluster)) if node.address == "127.0.0.9"]

    async def scenario() -> None:
        async with launcher(ray_cluster) as started:
            await started.place(plan_placement(nodes, groups), groups)
            starting = asyncio.create_task(started.start(role("rollout-0", "NeverReady", role_env, tmp_path)))
            while "loading" not in log_of(tmp_path, "rollout-0"):
                await asyncio.sleep(0.1)
            await asyncio.to_thread(ray_cluster.nodes.cluster.remove_node, doomed_node, allow_graceful=False)
            with pytest.raises(PeerFailedError, match=r"its node 127.0.0.9 was lost(.|\n)*loading the model"):
                await starting

    asyncio.run(scenario())


def log_of(folder: Path, name: str) -> str:
    path = folder / f"{name}.log"
    return path.read_text() if path.exists() else ""


def test_roles_whose_agent_dies_start_again_in_their_own_place(
    ray_cluster: RayCluster, role_env: dict[str, str], tmp_path: Path
) -> None:
    groups = [RankGroup(role="trainer", num_replicas=2, tensor_parallel=2)]

    async def scenario() -> None:
        async with launcher(ray_cluster) as started:
            await started.place(plan(ray_cluster, groups), groups)
            specs = [role(f"trainer-{rank}", "Patient", role_env, tmp_path) for rank in range(4)]
            former = await asyncio.gather(*(started.start(spec) for spec in specs))
            before = await call_all(former, "visible_devices", returns=list[str], deadline_s=30)
            os.kill(parent_of(former[0].pid), signal.SIGKILL)
            assert {await actor.wait_dead() for actor in former} == {await former[0].wait_dead()}
            ranks = await asyncio.gather(*(started.start(spec) for spec in specs))
            assert len({parent_of(rank.pid) for rank in ranks}) == 1  # one block, reserved once
            after = await call_all(ranks, "visible_devices", returns=list[str], deadline_s=30)
            assert [len(devices) for devices in after] == [len(devices) for devices in before] == [1] * 4
            assert {rank.address for rank in ranks} == {actor.address for actor in former}

    asyncio.run(scenario())


@pytest.mark.nightly
@needs_linux
def test_a_role_whose_driver_is_silent_ends_in_time(
    ray_cluster: RayCluster, role_env: dict[str, str], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with launcher(ray_cluster, silent_after_s=2) as started:
            actor = await started.start(role("rollout-0", "Patient", role_env, tmp_path))
            with ends(actor.pid, within_s=60):
                pass  # it waits without the event loop: the driver is stalled
            async with asyncio.timeout(30):
                await actor.wait_dead()

    asyncio.run(scenario())


@pytest.mark.nightly
@needs_linux
def test_an_agent_that_is_silent_is_given_up_in_time(
    ray_cluster: RayCluster, role_env: dict[str, str], tmp_path: Path
) -> None:
    groups = [engines(1, 4)]

    async def scenario() -> None:
        async with launcher(ray_cluster, silent_after_s=3) as started:
            await started.place(plan(ray_cluster, groups), groups)
            actor = await started.start(role("rollout-0", "Faulty", role_env, tmp_path))
            call = asyncio.create_task(actor.call("hang", deadline_s=100))
            await asyncio.sleep(0.2)
            agent = parent_of(actor.pid)
            os.kill(agent, signal.SIGSTOP)
            try:
                async with asyncio.timeout(60):
                    with pytest.raises(PeerFailedError, match=r"no message from its node 127.0.0.\d for 3 s"):
                        await call
                    again = await started.start(role("rollout-0", "Patient", role_env, tmp_path))
                assert again.address != actor.address  # its node may be cut off
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(agent, signal.SIGCONT)

    asyncio.run(scenario())
