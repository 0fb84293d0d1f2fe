"""`--shrink`: every large recipe rehearsed with real processes, on a model made on the spot."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_async_app._commands.shrink import shrink_run
from grpo_async_app._config.sections import GrpoConfig
from offbeat_core import load_config
from offbeat_run import read_metrics
from offbeat_testing import CommandLine, RunningCommand

RECIPES = Path(__file__).parents[1] / "recipes"
ALL = sorted(RECIPES.glob("*.toml"))
every_recipe = pytest.mark.parametrize("recipe", ALL, ids=lambda path: path.stem)
REHEARSED_IN_CI = {"math_qwen3_8b_megatron", "smollm2_arithmetic", "smollm2_jsonl"}
"""The others differ in layout and sizes."""


@pytest.fixture(autouse=True)
def _no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a model nor data are there."""
    for name in ("OFFBEAT_MODELS", "OFFBEAT_DATA"):
        monkeypatch.setenv(name, str(tmp_path / "nowhere"))
    monkeypatch.delenv("OFFBEAT_DEVICE", raising=False)


def test_a_rehearsal_is_planned_with_what_stands_in_for_what(command: CommandLine) -> None:
    ended = command("plan", RECIPES / "math_qwen3_8b_megatron.toml", "--shrink", "--rollout.backend", "torch")
    assert ended.code == 0, ended.err
    text = " ".join(ended.out.split())
    assert "T0.0 T0.1 R0 R1" in text, "four ranks share each layer: two do so here"
    is_replaced = "engine.backend: megatron is not installed, torch takes its place" in text
    assert is_replaced == (importlib.util.find_spec("megatron") is None)
    assert "shrunk: cluster.launcher: local instead of ray" in text


def test_a_rehearsal_is_for_this_machine(command: CommandLine) -> None:
    ended = command("plan", RECIPES / "math_qwen3_8b_fsdp.toml", "--shrink", "--cluster", "2x8")
    assert ended.code == 2
    assert "leave --cluster and --fit out" in ended.err


@every_recipe
def test_every_recipe_passes_the_preflight_when_shrunk(recipe: Path, tmp_path: Path) -> None:
    preflight = shrink_run(load_config(recipe, GrpoConfig), tmp_path / "model").prepare()
    assert preflight.num_updates == preflight.config.async_.trigger_parameter_sync_step + 1
    assert preflight.model.num_parameters < 200_000
    assert preflight.layout.num_ranks == min(load_config(recipe, GrpoConfig).engine.num_ranks, 2)


def test_a_trainer_that_takes_no_images_rehearses_the_language_half(tmp_path: Path) -> None:
    whole = load_config(RECIPES / "geo3k_qwen3vl_8b_cuda.toml", GrpoConfig)
    shared = replace(whole, engine=replace(whole.engine, options={"tensor_parallel": 2}))
    rehearsal = shrink_run(shared, tmp_path / "model")
    assert rehearsal.family == "qwen3"
    assert rehearsal.config.data.path == "arithmetic:2"
    assert "shrunk: model: qwen3_vl is rehearsed with a qwen3" in rehearsal.notices


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_recipe_with_images_is_rehearsed_with_images(family: str, tmp_path: Path) -> None:
    whole = load_config(RECIPES / "geo3k_qwen3vl_8b_cuda.toml", GrpoConfig)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(f'{{"model_type": "{family}"}}')
    preflight = shrink_run(replace(whole, model=replace(whole.model, path=str(tmp_path / "own"))), tmp_path).prepare()
    prompt = preflight.prompts.train[0]
    assert [image.shape[2] for image in prompt.images] == [3]
    assert prompt.fields["problem"] == "<image>=", "the columns are those of the recipe"
    assert preflight.model.family == family


def test_the_smallest_batch_keeps_the_staleness_in_effect(tmp_path: Path) -> None:
    whole = load_config(RECIPES / "math_qwen3_8b_fsdp.toml", GrpoConfig)
    policy = replace(whole.async_, staleness_threshold=0.01, require_batches=1, mini_batch_size=400)
    small = shrink_run(replace(whole, async_=policy), tmp_path).config.async_
    assert small.max_admitted == small.groups_per_sync + 1


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem in REHEARSED_IN_CI else pytest.mark.nightly)
        for path in sorted(RECIPES.glob("*.toml"))
    ],
)
def test_a_recipe_is_rehearsed_with_real_processes(
    recipe: Path, tmp_path: Path, forked_main: Callable[[], object]
) -> None:
    embedded = ["--rollout.backend", "torch", "--rollout.options", "{}"]  # also where another engine is installed
    words = ["train", recipe, "--shrink", *embedded, "--out", tmp_path / "run"]
    with RunningCommand(forked_main, *words) as process:
        assert process.wait() == 0, process.output
        output = process.output
    logs = {path.stem for path in (tmp_path / "run" / "logs").glob("*.log")}
    config = load_config(tmp_path / "run" / "config.toml", GrpoConfig)
    whole = load_config(recipe, GrpoConfig)
    assert {"trainer-0", "rollout-0"} <= logs
    assert ("trainer-1" in logs) == (whole.engine.num_ranks > 1)
    assert ("rollout-1" in logs) == (whole.rollout.num_engines > 1)
    assert ("teacher-0" in logs) == whole.teacher.is_set
    assert config.algorithm.correction == whole.algorithm.correction
    assert config.async_.staleness_threshold == whole.async_.staleness_threshold
    steps = [line.step for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert max(steps) == config.engine.max_updates, output
    assert ("<img" in (tmp_path / "run" / "report.html").read_text()) == recipe.stem.startswith("geo3k"), (
        "with its images"
    )


@pytest.mark.parametrize(("transport", "rehearsed"), [("cuda-ipc", "auto"), ("tcp", "tcp"), ("nccl", "nccl")])
def test_weights_travel_as_in_the_run_where_cpus_can_do_it(tmp_path: Path, transport: str, rehearsed: str) -> None:
    recipe = sorted(RECIPES.glob("*.toml"))[0]
    whole = load_config(recipe, GrpoConfig, [f"--rollout.weight_transport={transport}"])
    assert shrink_run(whole, tmp_path / "model").config.rollout.weight_transport == rehearsed
