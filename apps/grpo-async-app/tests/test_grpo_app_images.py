"""Prompts with images: sampled, trained on by several ranks, validated, saved and shown, with real processes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from string import ascii_letters
from typing import Literal

import numpy as np
import pytest
from draw_geometry import main as draw_geometry

from grpo_async_app._config.environment_images import refuse_environment_images
from grpo_async_app._roles.groups import SampledGroup, load_groups, save_groups
from grpo_async_app._run.sampling import _later_turn
from offbeat_core import (
    Completion,
    ConfigError,
    GenerateRequest,
    Reply,
    SamplingParams,
    Trajectory,
    VersionSegment,
)
from offbeat_data import Picture
from offbeat_run import read_metrics
from offbeat_testing import CommandLine, RunningCommand, tiny_model, tiny_vision_model


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the layout of geo3k."""
    folder = tmp_path_factory.mktemp("figures")
    draw_geometry([str(folder), "--train", "16", "--test", "2", "--size-px", "64"])
    return folder


@pytest.fixture
def family() -> Literal["qwen3_vl", "qwen3_5"]:
    return "qwen3_vl"


@pytest.fixture
def config(family: Literal["qwen3_vl", "qwen3_5"], figures: Path, tmp_path: Path) -> Path:
    path = tmp_path / "images.toml"
    path.write_text(f"""
[model]
path = "{tiny_vision_model(tmp_path / "model", family)}"
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
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
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


ENVIRONMENT = '''
import base64
import io

import numpy as np
from PIL import Image

from offbeat_data import RewardScore


class Painter:
    """Shows a drawing after each of two turns, of another size and colour each time; longer answers score higher."""

    async def reset(self, prompt):
        self.index, self.lengths = prompt.index, []

    async def step(self, text):
        self.lengths.append(len(text))
        turn = len(self.lengths)
        if turn == 3:
            return None
        draw = np.random.default_rng([self.index, turn, len(text)])
        pixels = draw.integers(0, 256, (16 + 8 * turn, 24 + 8 * (self.index % 2), 3), np.uint8)
        Image.fromarray(pixels).save(file := io.BytesIO(), format="PNG")
        address = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        return [
            {
                "role": "tool",
                "content": [
                    {"type": "text", "text": f"turn {turn}:"},
                    {"type": "image_url", "image_url": {"url": address}},
                ],
            }
        ]

    async def reward(self):
        return RewardScore(value=float(sum(self.lengths)), parts={"turns": float(len(self.lengths))})

    async def close(self):
        pass
'''
SHOWN = (
    "--environment.name=painter:Painter",
    "--environment.max_tokens=160",
    f"--rollout.stop={json.dumps(list(ascii_letters))}",  # a model with random weights seldom ends a turn itself
    "--rollout.max_model_len=288",
    "--reward.name=",
    "--teacher.path=",
    "--algorithm.distillation_coefficient=0",
    "--algorithm.advantage=grpo",
    "--engine.max_tokens_per_microbatch=512",
    "--checkpoint.every=0",
    "--eval.every_updates=0",
)


@pytest.mark.timeout(300)
def test_a_trainer_sees_what_an_environment_has_shown_where_the_engine_saw_it(
    forked_main: Callable[[], object], config: Path, tmp_path: Path, own_module: Callable[[str, str], None]
) -> None:
    own_module("painter", ENVIRONMENT)
    run = tmp_path / "run"
    with RunningCommand(forked_main, "train", config, "--out", run, *SHOWN) as process:
        assert process.wait(240.0) == 0, process.output
        output = process.output
    lines = [line.values for line in read_metrics(run / "metrics.jsonl") if "train/reward" in line.values]
    assert len(lines) == 3, output
    for values in lines:
        # As above: nothing is stale, and any other pixels, places or positions would show in the ratios.
        assert abs(values["correction/ratio_max"] - 1) < 1e-4
        assert abs(values["correction/ratio_min"] - 1) < 1e-4
        assert values["engine/grad_norm"] > 0
    assert max(values["train/turns"] for values in lines) > 2, output
    with (run / "generations" / "train.jsonl").open("rb") as file:
        said = [json.loads(line)["completion"] for line in file]
    assert any("[tool] turn 2:[image]" in text for text in said)


def test_images_that_nobody_would_see_are_refused_before_a_run(
    command: CommandLine, config: Path, tmp_path: Path
) -> None:
    shows = ('--environment.options={command = ["true"], shows_images = true}', "--environment.name=mcp")
    words = ("plan", config, *shows, "--environment.max_tokens=64", "--rollout.max_model_len=192")
    taught = command(*words)
    assert taught.code == 2
    assert "a teacher sees those of prompts only" in taught.err
    alone = ("--teacher.path=", "--algorithm.distillation_coefficient=0")
    blind = command(*words, f"--model.path={tiny_model(tmp_path / 'blind')}", *alone)
    assert blind.code == 2
    assert "environment.options: shows_images shows images: " in blind.err
    assert "takes no images" in blind.err


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


def test_a_checkpoint_keeps_the_images_that_an_environment_has_shown(tmp_path: Path) -> None:
    plain = group(())
    images = tuple(np.full((8, 16, 3), number, np.uint8) for number in (7, 8))
    [turn] = plain.trajectories[0].turns
    replies = (Reply(ids=turn.ids, text="[tool] a"), Reply(ids=turn.ids, text="[tool] [image]", images=images))
    save_groups(tmp_path, [replace(plain, trajectories=[Trajectory(turns=(turn,) * 3, replies=replies)])])
    [found] = load_groups(tmp_path)[3].trajectories
    assert [reply.text for reply in found.replies] == ["[tool] a", "[tool] [image]"]
    assert [reply.images for reply in found.replies[:1]] == [()]
    np.testing.assert_array_equal(found.images, images)


def test_a_teacher_that_would_not_see_is_told() -> None:
    turn = group(()).trajectories[0].turns[0]
    reply = Reply(ids=turn.ids, images=(np.zeros((8, 8, 3), np.uint8),))
    refuse_environment_images([Trajectory.of(turn)])
    with pytest.raises(ConfigError, match="a teacher sees those of prompts only"):
        refuse_environment_images([Trajectory.of(turn), Trajectory(turns=(turn, turn), replies=(reply,))])


def test_a_later_turn_sees_the_images_of_the_first_and_what_was_shown_since() -> None:
    image = np.zeros((8, 8, 3), np.uint8)
    first = GenerateRequest(
        request_id="group-1",
        prompt_ids=np.array([1], np.int32),
        num_samples=4,
        images=(image,),
        params=SamplingParams(),
    )
    ids, shown = np.array([1, 2, 3], np.int32), np.ones((8, 8, 3), np.uint8)
    later = _later_turn(first, ids, (shown,), index=2, turn=1, max_tokens=5)
    assert [each is wanted for each, wanted in zip(later.images, (image, shown), strict=True)] == [True, True]
    assert (later.num_samples, later.request_id, len(later.prompt_ids)) == (1, "group-1-2-1", 3)
