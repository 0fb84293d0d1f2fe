"""A real run with trainer and vLLM on the same device: they take turns, and memory changes hands in order."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from offbeat_run import read_metrics, read_timeline
from offbeat_testing import RunningCommand, tiny_model

ORDER = [
    "trainer-0 sleep 1",
    "rollout-0 wake weights",
    "trainer-0 sleep 2",
    "rollout-0 wake kv_cache",
    "rollout-0 generate",
    "rollout-0 sleep",
    "trainer-0 wake",
    "trainer-0 train",
]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("level", "weight_format", "dtype"), [(1, "fp8", "bfloat16"), (2, "dtype", "float32")])
def test_vllm_and_the_trainer_take_turns(tmp_path: Path, level: int, weight_format: str, dtype: str) -> None:
    """With FP8 blocks from the trainer in one of the two, as values on a CPU."""
    model, run = tiny_model(tmp_path / "model", hidden_size=768, num_layers=4), tmp_path / "run"
    rows = [{"prompt": f"what is {n} and one?", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "vllm.toml").write_text(f"""
[model]
path = "{model}"
[data]
path = "{tmp_path}/sums.jsonl"
max_prompt_tokens = 64
[reward]
name = "number_match"
[rollout]
backend = "vllm"
weight_format = "{weight_format}"
dtype = "{dtype}"
samples_per_prompt = 2
max_tokens = 8
max_model_len = 96
max_running = 8
[engine]
learning_rate = 1e-4
[algorithm]
filter_groups = false
correction = "token_tis"
[async]
mini_batch_size = 4
staleness_threshold = 0
[cluster]
colocate = true
sleep_level = {level}
""")
    with RunningCommand("grpo_async_app", "train", tmp_path / "vllm.toml", "--out", run) as process:
        assert process.wait(deadline_s=500) == 0, process.output
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "train/reward" in line.values]
    assert [line.step for line in lines] == [1, 2]
    differs = [line.values["correction/kl_rollout_train"] for line in lines]
    assert min(differs) > 1e-5 if weight_format == "fp8" else max(differs) < 1e-6, differs
    steps = steps_of(run)
    assert [step for step, *_ in steps[3:19]] == ORDER * 2
    for (_, _, end, _), (step, start, _, _) in pairwise(steps):
        assert end <= start, step
    held = {step: resident for step, _, _, resident in steps if resident}
    weights_bytes = (model / "model.safetensors").stat().st_size
    assert held["trainer-0 wake"] - held["trainer-0 sleep 2"] > 2 * weights_bytes
    if level == 2:
        asleep = [resident for step, _, _, resident in steps if step == "rollout-0 sleep"]
        assert held["rollout-0 wake kv_cache"] - asleep[1] > 0.7 * weights_bytes


def steps_of(run: Path) -> list[tuple[str, float, float, int]]:
    """("role step", start, end, resident bytes) in order."""
    events = read_timeline(run / "timeline.json")
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [
        (f"{tracks[each['tid']]} {each['name']}", each["ts"], each["ts"] + each["dur"], each["args"])
        for each in events
        if each["ph"] == "X" and tracks[each["tid"]] != "weight sync" and not each["name"].startswith("take weights")
    ]
    steps = [(step, start, end, args.get("resident_bytes", 0)) for step, start, end, args in spans]
    return sorted(steps, key=lambda span: span[1])
