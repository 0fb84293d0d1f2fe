"""A real GRPO run on figures: vLLM samples from pictures, the trainer trains the tower too, and both see the same."""

import json
from pathlib import Path

import pytest
from draw_geometry import main as draw_geometry
from safetensors.torch import load_file

from offbeat_run import read_metrics
from offbeat_testing import RunningCommand, tiny_vision_model


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_vllm_samples_from_the_tower_as_it_is_trained(tmp_path: Path) -> None:
    model, run = tiny_vision_model(tmp_path / "model"), tmp_path / "run"
    draw_geometry([str(tmp_path / "figures"), "--train", "12", "--test", "2", "--size-px", "64"])
    (tmp_path / "images.toml").write_text(f"""
[model]
path = "{model}"
[data]
path = "{tmp_path}/figures"
eval_path = "{tmp_path}/figures"
eval_split = "test"
prompt_column = "problem"
max_prompt_tokens = 128
[reward]
name = "grpo_async_app._shrink_reward:variety"
[rollout]
backend = "vllm"
dtype = "float32"
samples_per_prompt = 2
max_tokens = 8
max_model_len = 136
max_running = 8
[engine]
learning_rate = 1e-3
max_updates = 3
[algorithm]
correction = "token_tis"
filter_groups = false
[async]
mini_batch_size = 4
staleness_threshold = 0
[eval]
every_updates = 3
[checkpoint]
every = 3
[profile]
steps = "1:2"
roles = ["trainer", "rollout"]
""")
    with RunningCommand("grpo_async_app", "train", tmp_path / "images.toml", "--out", run) as process:
        assert process.wait(deadline_s=500) == 0, process.output
    check_both_sides_see_the_same(run)
    check_the_tower_was_trained(model, run / "checkpoints" / "step-000003")
    check_traces(run)


def check_both_sides_see_the_same(run: Path) -> None:
    """Nothing is stale, so each update compares the trainer with what vLLM holds since the last one."""
    lines = [line.values for line in read_metrics(run / "metrics.jsonl") if "train/reward" in line.values]
    assert len(lines) == 3
    for values in lines:
        assert values["async/lag_histogram"] == [4.0]
        assert abs(values["correction/ratio_max"] - 1) < 1e-4
        assert abs(values["correction/ratio_min"] - 1) < 1e-4
        assert values["engine/grad_norm"] > 0
    assert [line.values for line in read_metrics(run / "metrics.jsonl") if "eval/reward" in line.values]
    generations = (run / "generations" / "train.jsonl").read_text().splitlines()
    assert all(len(json.loads(line)["images"]) == 1 for line in generations)


def check_the_tower_was_trained(model: Path, saved: Path) -> None:
    """By so much that an old tower beside the new model would be off by more than half a nat."""
    before, after = (load_file(folder / "model.safetensors") for folder in (model, saved))
    towers = [name for name in before if ".visual." in name]
    assert towers
    assert max(float((after[name] - before[name]).abs().max()) for name in towers) > 2e-3


def check_traces(run: Path) -> None:
    """vLLM's own, of the steps that it ran, beside the trainer's."""
    found = {path.name: path for path in (run / "profile").iterdir()}
    assert set(found) == {"trainer-0-1.json", "rollout-0-1.json"}
    names = {str(event.get("name")) for event in json.loads(found["rollout-0-1.json"].read_text())["traceEvents"]}
    assert any(name.startswith("execute_context_") for name in names), "vLLM names each step by what is in it"
    report = (run / "report.html").read_text()
    assert all(f"profile/{name}" in report for name in found)
