"""A trainer of four ranks that share the model as megatron-core does, and embedded engines that sample from it."""

import json
import math
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from role_faults import signal_role
from safetensors.torch import load_file

from offbeat_run import RunFolder, read_metrics
from offbeat_testing import CommandLine, RunningCommand, wait_until_gone

Main = Callable[[], object]
NUM_TRAIN = 20
MEGATRON = ["--engine.backend=megatron", "--engine.num_ranks=4"]
LAYOUTS = {
    "tp 2 × cp 2": ["--engine.options", "{tensor_parallel = 2, context_parallel = 2}"],
    "pp 2 × dp 2": ["--engine.options", "{pipeline_parallel = 2}"],
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
# On policy, so that the groups of an update are those of its prompts: the same run each time.
SYNCHRONOUS = ["--async.staleness_threshold=0", "--async.partial_rollout=false", "--rollout.seed=7"]


def values(run: Path, name: str) -> dict[int, float]:
    return {line.step: line.values[name] for line in read_metrics(run / "metrics.jsonl") if name in line.values}


def trained_prompts(run: Path) -> Counter[str]:
    with (run / "generations" / "train.jsonl").open("rb") as lines:  # what a model says may hold line ends of Unicode
        return Counter(json.loads(line)["prompt"] for line in lines)


def last_weights(run: Path) -> dict[str, torch.Tensor]:
    latest = RunFolder.open(run, write=False).checkpoints.latest()
    assert latest is not None
    return load_file(latest.path / "model.safetensors")


def run_to_its_end(main: Main, *words: object) -> None:
    with RunningCommand(main, *words) as process:
        assert process.wait() == 0, process.output


@pytest.mark.nightly
@every_layout
def test_on_policy_four_ranks_train_as_the_torch_engine_does(
    grpo_main: Main, grpo_config: Path, layout: list[str], lucky_reward: str, tmp_path: Path
) -> None:
    """Also with a reference policy. From the second update on the samples come from weights the ranks handed out."""
    words = ["train", grpo_config, *SYNCHRONOUS, "--algorithm.kl_coefficient=0.1", lucky_reward]
    run_to_its_end(grpo_main, *words, "--out", tmp_path / "torch")
    run_to_its_end(grpo_main, *words, "--out", tmp_path / "megatron", *MEGATRON, *layout)
    for name in ("train/reward", "train/loss", "engine/grad_norm", "train/kl_ref", "eval/reward"):
        expected = values(tmp_path / "torch", name)
        assert len(expected) > 1
        assert values(tmp_path / "megatron", name) == pytest.approx(expected, abs=1e-4), name
    got, wanted = last_weights(tmp_path / "megatron"), last_weights(tmp_path / "torch")
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(LAYOUTS["tp 2 × cp 2"], marks=pytest.mark.nightly), LAYOUTS["pp 2 × dp 2"]],
    ids=LAYOUTS,
)
def test_an_asynchronous_run_accounts_for_every_prompt(
    grpo_main: Main, grpo_config: Path, layout: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ["--async.staleness_threshold=1", "--rollout.num_engines=2", "--data.epochs=2"]
    run_to_its_end(grpo_main, "train", grpo_config, "--out", run, *MEGATRON, *layout, *words)
    assert set(trained_prompts(run).values()) == {2}
    assert len(trained_prompts(run)) == NUM_TRAIN
    assert list(values(run, "train/reward")) == list(range(1, 11))
    assert max(values(run, "train/lag_max").values()) >= 1.0
    # The trainer scores what it samples as the engines do: what they were handed is what it holds.
    assert all(math.isfinite(loss) for loss in values(run, "train/loss").values())


@pytest.mark.nightly
def test_a_run_killed_by_force_goes_on_in_another_layout(grpo_main: Main, grpo_config: Path, tmp_path: Path) -> None:
    run, words = tmp_path / "run", ["--data.epochs=2", "--checkpoint.every=1"]
    with RunningCommand(
        grpo_main, "train", grpo_config, "--out", run, *MEGATRON, *LAYOUTS["tp 2 × cp 2"], *words
    ) as process:
        process.wait_until(run.joinpath("config.toml").exists, "there is a run")
        process.wait_until(lambda: len(values(run, "train/reward")) >= 3, "three updates")
        started = process.descendants()
        process.kill()
        process.wait()
        wait_until_gone(started, deadline_s=20)
    run_to_its_end(grpo_main, "resume", run, *LAYOUTS["pp 2 × dp 2"])
    assert sorted(trained_prompts(run).values()) == [2] * NUM_TRAIN
    assert list(values(run, "train/reward")) == list(range(1, 11))


@pytest.mark.nightly
def test_a_rank_that_is_killed_is_named_and_the_trainer_starts_again(
    grpo_main: Main, grpo_config: Path, tmp_path: Path
) -> None:
    run, words = tmp_path / "run", ["--data.epochs=3", "--checkpoint.every=1"]
    with RunningCommand(
        grpo_main, "train", grpo_config, "--out", run, *MEGATRON, *LAYOUTS["pp 2 × dp 2"], *words
    ) as process:
        process.wait_until(run.joinpath("config.toml").exists, "there is a run")
        process.wait_until(lambda: len(values(run, "train/reward")) >= 2, "two updates")
        signal_role(process, "trainer-2", signal.SIGKILL)
        assert process.wait() == 0, process.output
        assert "trainer-2" in process.output, process.output
    assert sorted(trained_prompts(run).values()) == [3] * NUM_TRAIN
    assert max(values(run, "trainer/restarts").values()) == 1


@pytest.mark.nightly
def test_a_run_in_bfloat16_goes_on_from_its_checkpoint_bit_for_bit(
    grpo_main: Main, grpo_config: Path, lucky_reward: str, tmp_path: Path
) -> None:
    """Trainer and engines; what engines are handed is what the trainer computes with."""
    words = [*SYNCHRONOUS, lucky_reward, "--engine.backend=megatron", "--engine.num_ranks=2"]
    words += ["--engine.dtype=bfloat16", "--rollout.dtype=bfloat16", "--engine.options", "{pipeline_parallel = 2}"]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    run_to_its_end(grpo_main, "train", grpo_config, "--out", whole, *words)
    run_to_its_end(grpo_main, "train", grpo_config, "--out", parted, *words, "--engine.max_updates=3")
    run_to_its_end(grpo_main, "resume", parted, "--engine.max_updates=0")
    for name in ("train/reward", "train/loss", "engine/grad_norm"):
        assert len(values(whole, name)) == 5
        assert values(parted, name) == values(whole, name)
    got, wanted = last_weights(parted), last_weights(whole)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


@pytest.mark.nightly
def test_multi_token_prediction_learns_beside_the_policy(
    grpo_main: Main, grpo_config: Path, lucky_reward: str, tmp_path: Path
) -> None:
    """Its loss is logged, is the same in every layout, and falls; the policy is trained as without it."""
    words = ["train", grpo_config, *SYNCHRONOUS, *MEGATRON, lucky_reward, "--engine.learning_rate=1e-3"]
    sizes = {"shared": "tensor_parallel = 2, context_parallel = 2", "stages": "pipeline_parallel = 2"}
    for name, size in sizes.items():
        options = f"{{{size}, mtp_layers = 1, mtp_detached = true}}"
        run_to_its_end(grpo_main, *words, "--out", tmp_path / name, "--engine.options", options)
    run_to_its_end(grpo_main, *words, "--out", tmp_path / "without", *LAYOUTS["pp 2 × dp 2"])
    losses = values(tmp_path / "shared", "engine/mtp_loss_1")
    assert list(losses) == [1, 2, 3, 4, 5]
    assert losses[5] < losses[1]
    assert values(tmp_path / "stages", "engine/mtp_loss_1") == pytest.approx(losses, abs=1e-3)
    for name in sizes:
        assert values(tmp_path / name, "train/reward") == pytest.approx(values(tmp_path / "without", "train/reward"))


@pytest.mark.parametrize(
    ("options", "said"),
    {
        "no such option": ("{tensor_paralel = 2}", "did you mean tensor_parallel"),
        "layers that do not divide": ("{pipeline_parallel = 4}", "num_hidden_layers = 2"),
    }.values(),
)
def test_a_layout_that_cannot_be_is_refused_by_the_plan(
    grpo_command: CommandLine, grpo_config: Path, options: str, said: str
) -> None:
    ended = grpo_command("plan", grpo_config, *MEGATRON, "--engine.options", options)
    assert ended.code == 2
    assert said in ended.err


@pytest.mark.parametrize(("name", "layout"), LAYOUTS.items())
def test_the_plan_shows_the_layout(grpo_command: CommandLine, grpo_config: Path, name: str, layout: list[str]) -> None:
    ended = grpo_command("plan", grpo_config, *MEGATRON, *layout)
    assert ended.code == 0, ended.err
    assert f"4 x trainer (megatron, {name}" in " ".join(ended.out.split())
