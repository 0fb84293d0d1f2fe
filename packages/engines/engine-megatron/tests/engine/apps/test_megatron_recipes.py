"""The recipes for megatron-core, planned with the layout and the memory that it will have."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat_testing import RunningCommand, large_model_configs

APPS = Path(__file__).parents[6] / "apps"
GRPO, SFT = (APPS / name / "recipes" for name in ("grpo-async-app", "sft-app"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_model_configs(tmp_path_factory.mktemp("models"))


def planned(main: Callable[[], object], recipe: Path, cluster: str) -> dict[str, object]:
    with RunningCommand(main, "plan", recipe, "--cluster", cluster, "--json") as process:
        assert process.wait() == 0, process.output
        return json.loads(process.output[process.output.index("{") :])  # after lines of stderr on what it is doing


@pytest.mark.parametrize(
    ("application", "stem", "cluster", "data_parallel", "layout"),
    [
        ("sft", "math_qwen3_8b_megatron", "1x8", 2, "tp 4 × dp 2"),
        ("sft", "moe_30b_megatron", "1x8", 4, "tp 2 × dp 4 × ep 8"),
        ("grpo", "math_qwen3_8b_megatron", "2x8", 2, "tp 4 × dp 2"),
        ("grpo", "moe_30b_megatron", "4x8", 4, "tp 2 × pp 2 × dp 4 × ep 8"),
    ],
)
def test_a_recipe_is_planned_with_the_layout_it_will_have(
    request: pytest.FixtureRequest,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    application: str,
    stem: str,
    cluster: str,
    data_parallel: int,
    layout: str,
) -> None:
    monkeypatch.setenv("OFFBEAT_MODELS", str(models))
    main = request.getfixturevalue(f"{application}_main")
    found = planned(main, (GRPO if application == "grpo" else SFT) / f"{stem}.toml", cluster)
    rows = {row["what"]: row["text"] for row in found["rows"]}
    kernels = "local layers (TransformerEngine needs a GPU: got cpu), attention by runs"
    experts = ", experts grouped by torch" if stem.startswith("moe") else ""
    assert rows["layout"] == f"{layout}, {kernels}{experts}"
    assert "notice" not in rows
    assert found["batch"]["num_ranks" if application == "grpo" else "data_parallel"] == data_parallel
    held = found["memory_bytes"]["trainer"]
    assert held["gradients"] == pytest.approx(2 * held["weights"], abs=8), "float32 sums of bfloat16 weights"
    if stem.startswith("math"):
        assert held["optimizer"] == pytest.approx(6 * held["weights"] / data_parallel, abs=8)


@pytest.mark.nightly
@pytest.mark.parametrize("application", ["sft", "grpo"])
def test_a_recipe_with_images_is_rehearsed_with_them(
    request: pytest.FixtureRequest, tmp_path: Path, application: str
) -> None:
    main, run = request.getfixturevalue(f"{application}_main"), tmp_path / "run"
    recipe = (GRPO if application == "grpo" else SFT) / "geo3k_qwen3vl_8b_cuda.toml"
    with RunningCommand(main, "train", recipe, "--engine.backend=megatron", "--shrink", "--out", run) as process:
        assert process.wait() == 0, process.output
        assert "rehearsed with a" not in process.output, "a model that does not see takes the place of one that does"
    assert json.loads((run / "model" / "config.json").read_text())["model_type"] == "qwen3_vl"
