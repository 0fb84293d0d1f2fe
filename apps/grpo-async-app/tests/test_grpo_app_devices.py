"""Which device each role computes on: what a launcher gave it, and no other role has it. The devices are stand-ins."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import abacus_standin
import pytest

from grpo_async_app._config.resolved import resolve
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.fleet import Fleet
from grpo_async_app._preflight.placement import find_view, place_run
from grpo_async_app._preflight.preflight import check_run
from offbeat_core import ConfigError, PlacementError, RoleName, load_config
from offbeat_placement import grid_nodes
from offbeat_testing import CommandLine, RunningCommand

ON_ABACUS = ["--engine.device=abacus", "--rollout.device=abacus", "--rollout.backend=abacus"]
SHORT = ["--eval.every_updates=0", "--engine.max_updates=2"]


@pytest.fixture
def four_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has four, as far as this process can see."""
    give_devices(4, tmp_path, monkeypatch)


def give_devices(num_devices: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in abacus_standin.register(folder, num_devices).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(abacus_standin.VISIBLE, raising=False)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.nightly
def test_roles_of_one_machine_each_see_a_device_that_nobody_else_has(
    forked_main: Callable[[], object], config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has more of them, four of which the run is shown."""
    give_devices(8, tmp_path, monkeypatch)
    monkeypatch.setenv(abacus_standin.VISIBLE, "7,5,3,1")
    run = tmp_path / "run"
    roles = [*ON_ABACUS, "--engine.num_ranks=2", "--rollout.num_engines=2", "--profile.steps=0:1"]
    with RunningCommand(forked_main, "train", config, "--out", run, *SHORT, *roles) as process:
        assert process.wait() == 0, process.output
        assert "4 of 4 free abacus" in process.output
    assert [abacus_standin.said(run, f"trainer-{rank}") for rank in range(2)] == [
        ["opened abacus 0 of 7"],
        ["opened abacus 0 of 5"],
    ]
    said = [abacus_standin.said(run, f"rollout-{number}") for number in range(2)]
    assert said == [["samples on abacus 0 of 3"], ["samples on abacus 0 of 1"]]


def placed(config: Path, *words: str) -> dict[str, list[int | None]]:
    """Devices of each role on this machine."""
    loaded = load_config(config, GrpoConfig, words)
    ranks = place_run(loaded, find_view(loaded)).plan.ranks
    return {role: [rank.device for rank in ranks if rank.role == role] for role in ("trainer", "rollout", "teacher")}


def test_the_picture_names_a_device_that_two_roles_share_outside_the_plan(config: Path) -> None:
    loaded = load_config(config, GrpoConfig, ["--engine.device=abacus:0", "--rollout.device=cpu"])
    picture = place_run(loaded, find_view(loaded)).picture
    assert "trainer: 1 rank on abacus:0" in picture
    assert "rollout: 1 rank on CPUs" in picture


TEACHER = ["--teacher.path=t", "--teacher.device=abacus", "--algorithm.distillation_coefficient=1"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([*ON_ABACUS, "--rollout.num_engines=3"], ([0], [1, 2, 3], [])),
        (["--engine.device=auto", "--rollout.device=auto"], ([0], [1], [])),
        ([*ON_ABACUS, "--rollout.tensor_parallel=2", *TEACHER], ([2], [0, 1], [3])),
        (
            [*ON_ABACUS, "--engine.num_ranks=4", "--rollout.num_engines=4", "--cluster.colocate=true"],
            ([0, 1, 2, 3],) * 2,
        ),
        (["--engine.device=abacus:1", "--rollout.device=abacus"], ([None], [0], [])),
        (["--engine.device=abacus:1", "--rollout.device=abacus:1"], ([None], [None], [])),
        (["--engine.device=abacus", "--rollout.device=abacus:0", "--rollout.tensor_parallel=2"], ([2], [None] * 2, [])),
        (["--engine.device=cpu", "--rollout.device=abacus"], ([None], [0], [])),
    ],
)
@pytest.mark.usefixtures("four_devices")
def test_devices_of_one_machine_are_given_out_but_for_those_that_are_named(
    config: Path, words: list[str], expected: tuple[list[int | None], ...]
) -> None:
    assert tuple(placed(config, *words).values())[: len(expected)] == expected


@pytest.mark.usefixtures("four_devices")
def test_more_roles_than_devices_are_refused_with_what_fits(command: CommandLine, config: Path) -> None:
    ended = command("plan", config, *ON_ABACUS, "--engine.num_ranks=2", "--rollout.num_engines=3")
    assert ended.code == 2
    assert "2 × trainer of 1 abacus, 3 × rollout of 1 abacus; 5 abacus wanted, 4 free" in ended.err
    assert "what fits: rollout on the devices of trainer (cluster.colocate); or" in ended.err
    assert "rollout.num_engines 3 -> 2" in ended.err
    assert "roles that name one device by its number, such as KIND:0, share it" in ended.err
    assert "more node" not in ended.err


@pytest.mark.usefixtures("four_devices")
def test_an_engine_that_would_join_without_a_device_is_refused(config: Path, model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        loaded = load_config(config, GrpoConfig, ON_ABACUS)
        async with Fleet(resolve(loaded), str(model), tmp_path / "logs") as fleet:
            await fleet._place(place_run(loaded, find_view(loaded)))
            with pytest.raises(PlacementError, match=r"reserved for 1 rollout engines.* none for rollout-1"):
                await fleet._start_rollout(RoleName("rollout", 1))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("cudo", "engine.device = 'cudo': no such kind of device is known; choose auto, cpu"),
        ("cuda:0", "on a cluster each role takes those that it is given: name the kind alone (cuda)"),
    ],
)
def test_a_device_that_no_cluster_can_give_is_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch, device: str, text: str
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'offbeat-actors[ray]'")
    monkeypatch.setattr("offbeat_actors.ray.RayLauncher.nodes", lambda _: grid_nodes(1, 8))
    with pytest.raises(ConfigError, match=re.escape(text)):
        check_run(load_config(config, GrpoConfig, ["--cluster.launcher=ray", f"--engine.device={device}"]))


RECIPES = Path(__file__).parents[1] / "recipes"


@pytest.mark.parametrize(
    ("recipe", "trainers", "engines"),
    [("rloo_*", [0, 1, 2, 3], [4, 5, 6, 7]), ("math_trtllm", [4, 5, 6, 7], [0, 1, 2, 3])],
)
def test_a_recipe_for_one_node_without_ray_gives_each_role_devices_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, trainers: list[int], engines: list[int]
) -> None:
    give_devices(8, tmp_path, monkeypatch)
    found = placed(next(RECIPES.glob(f"{recipe}.toml")), "--engine.device=abacus", "--rollout.device=abacus")
    assert (found["trainer"], found["rollout"]) == (trainers, engines)


def test_the_server_of_the_trtllm_recipe_is_what_its_engine_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trtllm = pytest.importorskip("offbeat_rollout_trtllm._options")
    recipe = RECIPES / "math_trtllm.toml"
    text = recipe.read_text().replace("\\\n#", "")
    said = re.search(
        r"CUDA_VISIBLE_DEVICES=(\S+) python -m \S+ FOLDER --port 8000 --tensor-parallel (\d+) +--options '(.*)'", text
    )
    assert said
    give_devices(8, tmp_path, monkeypatch)
    engines = placed(recipe, "--engine.device=abacus", "--rollout.device=abacus")["rollout"]
    assert said[1] == ",".join(map(str, engines))
    rollout = load_config(recipe, GrpoConfig).rollout
    assert int(said[2]) == rollout.tensor_parallel
    options, own = trtllm.TrtllmOptions.parse(json.loads(said[3])), trtllm.TrtllmOptions.parse(rollout.options)
    assert options == replace(own, server="", engine_args={"max_batch_size": rollout.max_running})
