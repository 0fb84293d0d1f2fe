"""`--shrink`: every recipe rehearsed with real processes, on a model made on the spot."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat_core import load_config
from offbeat_run import read_metrics
from offbeat_testing import CommandLine, RunningCommand, forked_main, tiny_vision_model
from sft_app._config import SftConfig
from sft_app._shrink import shrink_run

RECIPES = Path(__file__).parents[1] / "recipes"
every_recipe = pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
REHEARSED_IN_CI = {"math_qwen3_8b_megatron", "smollm2_chat", "smollm2_dpo", "smollm2_reward"}
"""The others differ in layout and sizes."""


@pytest.fixture(autouse=True)
def _no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a model nor data are there."""
    for name in ("OFFBEAT_MODELS", "OFFBEAT_DATA"):
        monkeypatch.setenv(name, str(tmp_path / "nowhere"))
    monkeypatch.delenv("OFFBEAT_DEVICE", raising=False)


@every_recipe
def test_a_shrunken_recipe_has_the_structure_of_the_whole(recipe: Path, tmp_path: Path) -> None:
    whole = load_config(recipe, SftConfig)
    small = shrink_run(whole, tmp_path / "model").config
    assert small.engine.num_ranks == min(whole.engine.num_ranks, 2)
    assert (small.engine.device, small.engine.max_updates) == ("cpu", 2)
    for key in ("dtype", "schedule", "learning_rate", "activation_checkpointing", "weight_decay"):
        assert getattr(small.engine, key) == getattr(whole.engine, key)
    assert bool(small.engine.options.get("tensor_parallel")) == bool(whole.engine.options.get("tensor_parallel"))
    assert small.preference == whole.preference
    for key in ("prompt_column", "completion_column", "messages_column", "too_long", "shuffle"):
        assert getattr(small.data, key) == getattr(whole.data, key)
    assert bool(small.eval.every_updates) == bool(whole.eval.every_updates)


def test_steps_to_trace_that_a_rehearsal_does_not_reach_are_left_out(tmp_path: Path) -> None:
    whole = load_config(RECIPES / "smollm2_chat.toml", SftConfig, ["--profile.steps=10:12"])
    assert shrink_run(whole, tmp_path / "model").config.profile.steps == ""


def test_a_rehearsal_is_planned_with_what_stands_in_for_what(command: CommandLine) -> None:
    ended = command("plan", RECIPES / "moe_30b_megatron.toml", "--shrink")
    assert ended.code == 0, ended.err
    text = " ".join(ended.out.split())
    assert "2 that train together as tp 2" in text, "two ranks share each layer, here too"
    is_replaced = "shrunk: engine.backend: megatron is not installed, torch takes its place" in text
    assert is_replaced == (importlib.util.find_spec("megatron") is None)


def test_a_trainer_that_takes_no_images_rehearses_the_language_half(tmp_path: Path) -> None:
    whole = load_config(RECIPES / "geo3k_qwen3vl_8b_cuda.toml", SftConfig)
    shared = replace(whole, engine=replace(whole.engine, options={"tensor_parallel": 2}))
    rehearsal = shrink_run(shared, tmp_path / "model")
    assert rehearsal.family == "qwen3"
    assert "shrunk: model: qwen3_vl is rehearsed with a qwen3" in rehearsal.notices


def test_the_family_of_a_model_that_is_here_is_read(tmp_path: Path) -> None:
    whole = load_config(RECIPES / "geo3k_qwen3vl_8b_cuda.toml", SftConfig)
    here = replace(whole, model=replace(whole.model, path=str(tiny_vision_model(tmp_path / "own", "qwen2_5_vl"))))
    rehearsal = shrink_run(here, tmp_path / "model")
    assert (rehearsal.family, rehearsal.notices) == ("qwen2_5_vl", ())
    preflight = rehearsal.prepare()
    assert all(len(sequence.images) == 1 for example in preflight.examples.train for sequence in example.sequences)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem in REHEARSED_IN_CI else pytest.mark.nightly)
        for path in sorted(RECIPES.glob("*.toml"))
    ],
)
def test_a_recipe_is_rehearsed_with_real_processes(recipe: Path, tmp_path: Path) -> None:
    run, whole = tmp_path / "run", load_config(recipe, SftConfig)
    with RunningCommand(
        forked_main("sft_app", "offbeat_engine_torch"), "train", recipe, "--shrink", "--out", run
    ) as process:
        assert process.wait() == 0, process.output
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line.step == 2]
    values = {name: value for line in lines for name, value in line.values.items()}
    assert values["train/loss"] > 0
    assert "eval/loss" in values
    assert (run / "logs" / "trainer-1.log").exists() == (whole.engine.num_ranks > 1)
    assert (run / "report.html").exists()
