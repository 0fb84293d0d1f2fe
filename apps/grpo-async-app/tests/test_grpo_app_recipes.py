"""The recipes are configurations that the application takes."""

import json
from pathlib import Path

import pytest

from grpo_async_app._config import GrpoConfig
from offbeat_run import load_config
from offbeat_testing import CommandLine, tiny_model

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))


def test_there_are_recipes() -> None:
    assert {"smollm2_arithmetic.toml", "smollm2_jsonl.toml"} <= {path.name for path in RECIPES}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_parses_and_takes_its_model_from_the_environment(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBEAT_MODELS", "/models")
    config = load_config(recipe, GrpoConfig)
    assert config.model.path.startswith("/models/")
    assert config.data.max_prompt_tokens + config.rollout.max_tokens <= config.rollout.max_model_len
    assert config.eval.every_updates
    assert config.data.eval_size or config.data.eval_path


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_can_be_planned(
    command: CommandLine, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBEAT_MODELS", str(tmp_path))
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path))
    tiny_model(tmp_path / "SmolLM2-135M-Instruct")
    rows = [{"prompt": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(80)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # The tiny model's tokenizer needs more tokens for the same text.
    ended = command("plan", recipe, "--data.max_prompt_tokens", "192", "--rollout.max_model_len", "256")
    assert ended.code == 0, ended.err
    assert "64 samples" in " ".join(ended.out.split())
