"""A Qwen3-VL of 0.4 million weights learns to see: from nothing, on drawn figures, by SFT and then asynchronous GRPO.

The question is the same for every figure, so only the picture can answer it. Some four minutes on two cores that do
nothing else, and never more than fifteen.
"""

import json
import random
from pathlib import Path
from statistics import mean

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from draw_geometry import main as draw_geometry

from offbeat_run import read_metrics
from offbeat_testing import RunningCommand, tiny_vision_model

NUM_HELD_OUT = 100
LIMIT_S = 900  # what is promised of all of it, on two cores
pytestmark = pytest.mark.timeout(LIMIT_S)

SFT = """
[model]
path = "{folder}/model"
[data]
path = "{folder}/figures/train.parquet"
eval_path = "{folder}/figures/test.parquet"
prompt_column = "problem"
completion_column = "answer"
max_sequence_tokens = 256
epochs = 0
[engine]
device = "cpu"
learning_rate = 1e-3
warmup_steps = 20
batch_size = 64
max_updates = 150
[eval]
every_updates = 50
[checkpoint]
save_optimizer = false
"""

GRPO = """
[model]
path = "{folder}/sft/checkpoints/step-000150"
[data]
path = "{folder}/figures/train.parquet"
eval_path = "{folder}/figures/test.parquet"
prompt_column = "problem"
max_prompt_tokens = 140
epochs = 0
[reward]
name = "math_verify"
[rollout]
dtype = "float32"
samples_per_prompt = 16
max_tokens = 4
max_model_len = 144
max_running = 128
[engine]
device = "cpu"
learning_rate = 3e-4
schedule = "linear"
max_updates = 200
[algorithm]
correction = "token_tis"
[async]
mini_batch_size = 16
staleness_threshold = 0.5
partial_rollout = true
[eval]
every_updates = 20
temperature = 1.0      # how good the policy is that learns, not its likeliest answer alone
[checkpoint]
every = 200
[cluster]
trainer_threads = 1
rollout_threads = 1
"""


def test_a_model_learns_what_only_the_picture_shows(tmp_path: Path) -> None:
    figures = tmp_path / "figures"
    draw_geometry([str(figures), "--test", str(NUM_HELD_OUT), "--size-px", "64", "--kinds", "squares_area"])
    shuffle_pictures(figures / "test.parquet", figures / "shuffled.parquet")
    tiny_vision_model(tmp_path / "model", spread=0.02)
    train("sft_app", tmp_path, "sft", SFT)
    train("grpo_async_app", tmp_path, "grpo", GRPO)

    curve, rewards = (values(tmp_path / "grpo", name) for name in ("eval/accuracy", "train/reward"))
    begun, ended = mean(rewards[:20]), mean(rewards[-20:])
    right = accuracy(tmp_path / "grpo", figures / "test.parquet")
    shuffled = accuracy(tmp_path / "grpo", figures / "shuffled.parquet")
    twenties = [round(mean(rewards[at : at + 20]), 2) for at in range(0, len(rewards), 20)]
    print(f"mean reward of twenty updates each {twenties}; held-out accuracy of every twentieth {curve}")
    print(f"at the end, greedily: {right} with the right pictures, {shuffled} with shuffled ones")
    assert ended >= begun + 0.15, "GRPO has taught nothing"
    assert curve[-1] > curve[0], "nothing that holds for other figures"
    assert right >= 0.7
    assert shuffled <= 0.3, "the picture was not needed"


def shuffle_pictures(path: Path, to: Path) -> None:
    """Return the same problems, each with the picture of another."""
    table = pq.read_table(path)
    pictures = table.column("images").to_pylist()
    random.Random(0).shuffle(pictures)
    field = table.schema.field("images")
    pq.write_table(table.set_column(0, field, pa.array(pictures, field.type)), to)


def train(app: str, folder: Path, name: str, config: str) -> None:
    path = folder / f"{name}.toml"
    path.write_text(config.format(folder=folder))
    with RunningCommand(app, "train", path, "--out", folder / name) as process:
        assert process.wait(LIMIT_S) == 0, process.output


def values(run: Path, name: str) -> list[float]:
    return [line.values[name] for line in read_metrics(run / "metrics.jsonl") if name in line.values]


def accuracy(run: Path, figures: Path) -> float:
    """Return the accuracy of the last checkpoint, with greedy answers."""
    out = run / "evals" / figures.name
    words = ["eval", run, "--out", out, f"--data.eval_path={figures}", "--eval.temperature=0"]
    with RunningCommand("grpo_async_app", *words) as process:
        assert process.wait(LIMIT_S) == 0, process.output
    [table] = json.loads((out / "table.json").read_text())["sets"]
    return float(table["estimates"]["avg@1"]["value"])
