"""Prompts with images: sampled, trained on by several ranks, validated, saved and shown, with real processes."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from draw_geometry import main as draw_geometry

from grpo_async_app._roles.groups import SampledGroup, load_groups, save_groups
from grpo_async_app._run.sampling import _later_turn
from offbeat_data import Picture
from offbeat_run import read_metrics
from offbeat_testing import RunningCommand, tiny_vision_model
from offbeat_types import Completion, GenerateRequest, SamplingParams, Trajectory, VersionSegment


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the layout of geo3k."""
    folder = tmp_path_factory.mktemp("figures")
    draw_geometry([str(folder), "--train", "16", "--test", "2", "--size-px", "64"])
    return folder


@pytest.fixture
def config(figures: Path, tmp_path: Path) -> Path:
    path = tmp_path / "images.toml"
    path.write_text(f"""
[model]
path = "{tiny_vision_model(tmp_path / "model")}"
[data]
path = "{figures}"
eval_path = "{figures}"
eval_split = "test"
prompt_column = "problem"
max_prompt_tokens = 128
[reward]
name = "grpo_async_app._shrink_reward:variety"
[rollout]
dtype = "float32"
samples_per_prompt = 2
max_tokens = 8
max_model_len = 136
[engine]
learning_rate = 1e-3
num_ranks = 2
max_updates = 3
max_tokens_per_microbatch = 256
[algorithm]
correction = "token_tis"
advantage = "remax"
distillation_coefficient = 0.1
[teacher]
path = "{tmp_path / "model"}"
[async]
mini_batch_size = 4
staleness_threshold = 0
[eval]
every_updates = 3
[checkpoint]
every = 3
[cluster]
trainer_threads = 1
rollout_threads = 1
""")
    return path


@pytest.mark.timeout(300)
def test_a_run_trains_on_images_that_both_sides_see_alike(
    forked_main: Callable[[], object], config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with RunningCommand(forked_main, "train", config, "--out", run) as process:
        assert process.wait(240.0) == 0, process.output
        output = process.output
    lines = [line.values for line in read_metrics(run / "metrics.jsonl") if "train/reward" in line.values]
    assert len(lines) == 3, output
    for values in lines:
        # Nothing is stale, so each update compares the trainer with what the engine holds since the last one. Other
        # pixels, places or positions of an image on one side, or a tower that was not sent, make ratios far from 1.
        assert values["async/lag_histogram"] == [4.0]
        assert abs(values["correction/ratio_max"] - 1) < 1e-4
        assert abs(values["correction/ratio_min"] - 1) < 1e-4
        assert values["engine/grad_norm"] > 0
    assert lines[0]["distillation/kl_k3"] < 1e-6, "the teacher is the model that was begun with, and sees the same"
    for kind, number in (("train", 4), ("validation", 2)):
        with (run / "generations" / f"{kind}.jsonl").open("rb") as file:
            shown = [json.loads(line) for line in file]
        assert len(shown) >= number
        assert all(len(each["images"]) == each["prompt"].count("<|image_pad|>") == 1 for each in shown)
        assert all(each["images"][0].startswith("data:image/") for each in shown)
    assert "<img" in (run / "report.html").read_text()
    saved = (run / "checkpoints" / "step-000003" / "preprocessor_config.json", run / "config.toml")
    assert all(path.is_file() for path in saved)


def group(pictures: tuple[Picture, ...]) -> SampledGroup:
    ids = np.array([1, 2], np.int32)
    turn = Completion(
        ids=ids,
        logprobs=np.zeros(2, np.float32),
        segments=(VersionSegment(version=0, num_tokens=2),),
        stop_reason="eos",
    )
    return SampledGroup(
        group_id=3,
        item=0,
        prompt_ids=ids,
        trajectories=[Trajectory.of(turn)],
        rewards=[1.0],
        parts=[{}],
        pictures=pictures,
    )


def test_a_checkpoint_keeps_the_images_of_what_waits_to_be_trained_on(tmp_path: Path) -> None:
    pictures = tuple(Picture(data=bytes([1, 2, number]), height=8 * number, width=16) for number in (1, 2))
    save_groups(tmp_path, [group(pictures)])
    assert load_groups(tmp_path)[3].pictures == pictures


def test_a_later_turn_sees_the_images_of_the_first() -> None:
    image = np.zeros((8, 8, 3), np.uint8)
    first = GenerateRequest(
        request_id="group-1",
        prompt_ids=np.array([1], np.int32),
        num_samples=4,
        images=(image,),
        params=SamplingParams(),
    )
    later = _later_turn(first, np.array([1, 2, 3], np.int32), index=2, turn=1, max_tokens=5)
    assert later.images == (image,)
    assert (later.num_samples, later.request_id, len(later.prompt_ids)) == (1, "group-1-2-1", 3)
