"""The devices that a role sees where none are reserved, and those a machine and a Ray cluster are planned with."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from offbeat_actors import ClusterConfig, LocalLauncher, RoleSpec, find_view
from offbeat_actors.ray._agent import _whereabouts
from offbeat_core import BackendError, RoleName
from offbeat_placement import RankGroup, grid_nodes, plan_placement

VARIABLE = "ABACUS_VISIBLE_DEVICES"
MEMORY_BYTES = 80 << 30
GROUPS = [
    RankGroup(role="trainer", num_replicas=2, accelerator="abacus"),
    RankGroup(role="rollout", tensor_parallel=2, accelerator="abacus", process_per_replica=True),
    RankGroup(role="teacher", tensor_parallel=2, accelerator="abacus", shares_devices_with="rollout"),
    RankGroup(role="environment", accelerator="", process_per_replica=True),
]


@pytest.fixture
def _abacus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package is installed that brings a kind of device: as much of one as a launcher asks for. Eight are here."""
    about = tmp_path / "abacus-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: abacus\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[offbeat.device]\nabacus = abacus_kind:Abacus\n")
    answers = (f"visible_variable = {VARIABLE!r}", f"memory_of_smallest = staticmethod(lambda: {MEMORY_BYTES})")
    (tmp_path / "abacus_kind.py").write_text("\n    ".join(["class Abacus:", *answers]))
    monkeypatch.setattr("offbeat_actors._resources.available_devices", lambda: {"abacus": 8, "cpu": 1})
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_abacus")
@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (None, {"trainer-0": "2", "trainer-1": "3", "rollout-0": "0,1", "teacher-1": "1", "environment-0": ""}),
        (
            "7,5,3,1",
            {"trainer-0": "3", "trainer-1": "1", "rollout-0": "7,5", "teacher-1": "5", "environment-0": "7,5,3,1"},
        ),
    ],
)
def test_a_role_sees_the_devices_of_its_place_also_when_started_again(
    role_env: dict[str, str], monkeypatch: pytest.MonkeyPatch, shown: str | None, expected: dict[str, str]
) -> None:
    monkeypatch.setenv(VARIABLE, shown) if shown else monkeypatch.delenv(VARIABLE, raising=False)
    plan = plan_placement(grid_nodes(1, 4, "abacus"), GROUPS)

    async def seen(launcher: LocalLauncher, name: str) -> str:
        role = await launcher.start(RoleSpec(RoleName.parse(name), "actor_roles:Patient", env=role_env))
        devices = await role.call("visible_devices", returns=list[str])
        await role.stop()
        return ",".join(devices)

    async def scenario() -> list[dict[str, str]]:
        async with LocalLauncher("test-run") as launcher:
            await launcher.place(plan, GROUPS)
            found = await asyncio.gather(*(seen(launcher, name) for name in expected))
            return [dict(zip(expected, found, strict=True)), {"trainer-1": await seen(launcher, "trainer-1")}]

    first, again = asyncio.run(scenario())
    assert first == expected
    assert again["trainer-1"] == expected["trainer-1"]


@pytest.mark.usefixtures("_abacus")
def test_devices_that_a_role_names_by_number_are_given_to_no_other_role() -> None:
    devices = {"engine.device": "abacus", "rollout.device": "abacus:2", "teacher.device": "abacus:6"}
    view = find_view(ClusterConfig(), devices, widths={"rollout.device": 3})
    [node] = view.nodes
    assert not view.reserves
    assert node.free == {"abacus": (0, 1, 5, 7)}
    assert node.total == {"abacus": 8}
    assert node.accelerator_memory_bytes == MEMORY_BYTES


def test_devices_of_an_unknown_kind_are_refused() -> None:
    groups = [RankGroup(role="trainer", accelerator="abacus")]
    plan = plan_placement(grid_nodes(1, 1, "abacus"), groups)
    with pytest.raises(BackendError, match=r"offbeat\.device backend 'abacus' is not installed"):
        asyncio.run(LocalLauncher("test-run").place(plan, groups))


def test_devices_of_a_ray_worker_are_ordered_by_number_and_those_with_names_come_last() -> None:
    held = {"GPU": ["10", "GPU-b", "2", "GPU-a"]}
    context = SimpleNamespace(get_accelerator_ids=lambda: held, get_node_id=lambda: "n")
    ray = SimpleNamespace(
        get_runtime_context=lambda: context, util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    )
    assert _whereabouts(ray).devices == ["2", "10", "GPU-a", "GPU-b"]


@pytest.mark.parametrize(("shown", "number"), [(None, 4), ("2,3", 2), ("", 0)])
def test_a_ray_cluster_of_our_own_is_planned_with_what_ray_will_find(
    monkeypatch: pytest.MonkeyPatch, shown: str | None, number: int
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'offbeat-actors[ray]'")
    from ray._private.accelerators import NvidiaGPUAcceleratorManager
    from ray._private.resource_and_label_spec import ResourceAndLabelSpec

    from offbeat_actors.ray import cluster_nodes

    monkeypatch.setattr(NvidiaGPUAcceleratorManager, "get_current_node_num_accelerators", staticmethod(lambda: 4))
    name = "CUDA_VISIBLE_DEVICES"
    monkeypatch.setenv(name, shown) if shown is not None else monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # other tests are connected to a cluster of theirs
    [node] = cluster_nodes(ClusterConfig(launcher="ray"))
    assert node.free == ({"GPU": tuple(range(number))} if number else {})
    assert ResourceAndLabelSpec().resolve(is_head=True).to_resource_dict().get("GPU", 0) == number
