"""Real runs on a tiny model: trained, killed, resumed, evaluated, and what the run folder then holds."""

import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from grpo_runs import Main, latest_checkpoint, run_to_its_end, statistics_of, trained_prompts, values_of

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._run.ending import EarlyEnd
from offbeat_core import load_config
from offbeat_run import read_metrics, read_timeline
from offbeat_testing import CommandLine, RunningCommand, wait_until_gone

NUM_TRAIN = 20


def test_a_run_trains_every_prompt_once_and_leaves_all_it_promises(
    command: CommandLine, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = command("train", config, "--out", run)
    assert ended.code == 0, ended.err
    assert sorted(trained_prompts(run).values()) == [1] * NUM_TRAIN
    assert list(values_of(run, "train/reward")) == [1, 2, 3, 4, 5]
    assert list(values_of(run, "eval/reward")) == [0, 2, 4, 5]
    assert max(values_of(run, "train/lag_max").values()) >= 1.0
    events = read_timeline(run / "timeline.json")
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(tracks[event["tid"]], event["name"], event["args"]) for event in events if event["ph"] == "X"]
    done = {(track, name) for track, name, _ in spans}
    assert {("trainer-0", "train"), ("rollout-0", "generate"), ("weight sync", "sync")} <= done
    taken = [args["version"] for track, name, args in spans if (track, name) == ("rollout-0", "take weights: merged")]
    assert taken == list(range(6))
    assert list((run / "tensorboard").iterdir())
    assert (run / "generations" / "validation.jsonl").stat().st_size
    assert "report:" in ended.out
    assert_report(run, ended.out)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    latest = latest_checkpoint(run)
    assert latest.step == 5
    AutoModelForCausalLM.from_pretrained(latest.path)
    AutoTokenizer.from_pretrained(latest.path)

    assert command("eval", run).code == 0


def assert_report(run: Path, said: str) -> None:
    """Require a report of a finished run that has its plots and the figures of the terminal's last lines."""
    page = (run / "report.html").read_text()
    assert '<span class="badge">finished</span>' in page
    assert "grpo-async-app train" in " ".join(re.sub("<[^>]+>", " ", page).split())
    assert len(re.findall(r'id="figure-\d+"', page)) >= 10
    tiles = re.findall(r'<span class="value">(.+?)</span><span class="label">(.+?)</span>', page)
    assert len(tiles) >= 7
    for value, label in tiles:
        assert f"{label} {value}" in said
    assert "held-out prompts (4 items)" in said


def test_a_run_ends_at_its_accuracy_and_a_resume_goes_on_only_for_more(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    everything_is_right = ["--eval.success_reward=-1", "--eval.stop_at_accuracy=1"]
    output = run_to_its_end(forked_main, "train", config, "--out", run, *everything_is_right)
    assert "ended early: accuracy 1.000 at update 0 reaches eval.stop_at_accuracy = 1" in " ".join(output.split())
    num_updates = latest_checkpoint(run).step
    assert num_updates < 5
    assert max(values_of(run, "eval/accuracy")) == num_updates, "the last policy is validated"
    run_to_its_end(forked_main, "resume", run)
    assert latest_checkpoint(run).step == num_updates
    run_to_its_end(forked_main, "resume", run, "--eval.stop_at_accuracy=0")
    assert sorted(trained_prompts(run).values()) == [1] * NUM_TRAIN


def test_a_run_below_its_accuracy_goes_on(config: Path) -> None:
    early_end = EarlyEnd(load_config(config, GrpoConfig, ["--eval.stop_at_accuracy=0.9"]), clock=lambda: 0.0)
    assert early_end.reason(None, 0) == early_end.reason(0.0, 1) == early_end.reason(0.899, 2) == ""
    assert early_end.reason(0.9, 3).startswith("accuracy 0.900 at update 3 reaches eval.stop_at_accuracy = 0.9")


def test_a_run_ends_at_its_time_limit_with_everything_trained_that_was_started(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ["--engine.max_time_s=6", "--data.epochs=1000", "--eval.every_updates=0", "--checkpoint.every=0"]
    output = run_to_its_end(forked_main, "train", config, "--out", run, *words)
    assert "ended early: the time limit engine.max_time_s = 6 s is over" in " ".join(output.split())
    statistics = statistics_of(run)
    assert 0 < statistics["submitted"] - statistics["reissued"] == statistics["trained"] < 1000 * NUM_TRAIN


def test_a_time_limit_before_the_first_update_leaves_no_checkpoint_and_is_no_failure(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    output = run_to_its_end(forked_main, "train", config, "--out", run, "--engine.max_time_s=0.001")
    assert "ended early: the time limit engine.max_time_s = 0.001 s is over" in " ".join(output.split())
    assert not (run / "generations" / "train.jsonl").exists()
    assert not list((run / "checkpoints").glob("step-*"))


@pytest.mark.nightly
def test_a_resumed_run_keeps_what_it_was_told_and_refuses_other_rows(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run_to_its_end(forked_main, "train", config, "--out", run)
    assert "resumes from update 5" in run_to_its_end(forked_main, "resume", run, "--data.epochs=2")
    assert "epochs = 2" in (run / "config.toml").read_text()
    run_to_its_end(forked_main, "resume", run)
    assert set(trained_prompts(run).values()) == {2}
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "what is 99 and one?", "answer": "100"}) + "\n")
    with RunningCommand(forked_main, "resume", run, "--data.epochs=3") as process:
        assert process.wait() == 2
        assert "begun with 20 training prompts and would continue with 21" in " ".join(process.output.split())


@pytest.mark.parametrize("mode", ["synchronous", "stream", "stale", "decoupled with every extra"])
def test_the_other_modes_train_every_prompt_once_too(
    forked_main: Main, config: Path, tmp_path: Path, mode: str
) -> None:
    words = {
        "synchronous": ["--async.staleness_threshold=0", "--async.partial_rollout=false"],
        "stream": [
            "--async.staleness_threshold=0",
            "--async.partial_rollout=false",
            "--async.trigger_parameter_sync_step=2",
        ],
        "stale": ["--async.partial_rollout=false", "--async.max_version_lag=2", "--async.staleness_threshold=1"],
        "decoupled with every extra": [
            "--async.require_batches=2",
            "--async.mini_batch_size=2",
            "--algorithm.correction=token_tis",
            "--algorithm.kl_coefficient=0.01",
            "--algorithm.advantage=remax",
            "--algorithm.overlong_buffer_tokens=4",
            "--rollout.num_engines=2",
        ],
    }[mode]
    run_to_its_end(forked_main, "train", config, "--out", tmp_path / "run", "--eval.every_updates=0", *words)
    assert sorted(trained_prompts(tmp_path / "run").values()) == [1] * NUM_TRAIN


FIRST_8_TEACH = """
import zlib


def first_8_teach(prompt, completion):
    return zlib.crc32(completion.encode()) / 2**32 if int(prompt.answer) <= 8 else 0.0
"""


def test_groups_without_signal_are_filtered_and_the_last_policy_is_validated_after_them(
    forked_main: Main, config: Path, own_module: Callable[[str, str], None], tmp_path: Path
) -> None:
    own_module("rewards_of_some", FIRST_8_TEACH)
    run, held_out = tmp_path / "run", tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "how much is 7 and one?", "answer": "8"}) + "\n")
    words = ["--reward.name=rewards_of_some:first_8_teach", "--algorithm.filter_groups=true", *SYNCHRONOUS[:2]]
    words += ["--data.shuffle=false", "--data.eval_size=0", f"--data.eval_path={held_out}", "--eval.every_updates=10"]
    run_to_its_end(forked_main, "train", config, "--out", run, *words, "--checkpoint.every=1")
    statistics = statistics_of(run)
    assert (statistics["trained"], statistics["filtered"]) == (8, 16), "the last sync is not the end"
    assert list(values_of(run, "eval/reward")) == [0, 2]
    assert latest_checkpoint(run).score == values_of(run, "eval/reward")[2]


def kill_in_the_midst(
    main: Callable[[], object], run: Path, words: list[object], num_updates: int, more_s: float
) -> None:
    """`kill -9` of a run's driver some time after so many updates."""
    with RunningCommand(main, *words) as process:
        process.wait_until(run.joinpath("config.toml").exists, "there is a run")
        process.wait_until(lambda: len(values_of(run, "train/reward")) >= num_updates, f"{num_updates} updates")
        time.sleep(more_s)
        started = process.descendants()
        process.kill()
        process.wait()
        wait_until_gone(started, 10)  # no process notifies them: they see that their driver is gone


def test_a_run_killed_at_random_moments_trains_every_prompt_once(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw, run = random.Random(seed), tmp_path / "run"
    words: list[object] = ["train", config, "--out", run, "--data.epochs=2", "--checkpoint.every=1"]
    for num_updates in sorted(draw.sample(range(10), 3)):
        kill_in_the_midst(forked_main, run, words, num_updates, draw.uniform(0, 0.3))
        words = ["resume", run]

    run_to_its_end(forked_main, *words)
    assert sorted(trained_prompts(run).values()) == [2] * NUM_TRAIN
    assert list(values_of(run, "train/reward")) == list(range(1, 11))
    assert list(values_of(run, "eval/reward")) == [0, 2, 4, 6, 8, 10]


SYNCHRONOUS = ("--async.staleness_threshold=0", "--async.partial_rollout=false", "--data.epochs=2")
ABOUT_TIME = ("perf/", "scoring/", "async/trainer_idle", "async/rollout_idle", "async/overlap")


def logger(run: Path) -> dict[int, tuple[dict[str, object], list[tuple[object, ...]]]]:
    """By update: what was measured, but for times; and each group trained on: prompt, version, completion, reward."""
    with (run / "generations" / "train.jsonl").open("rb") as lines:
        groups = [json.loads(line) for line in lines]
    said = ("prompt", "version", "completion", "num_tokens", "stop_reason", "reward")
    return {
        line.step: (
            {name: value for name, value in line.values.items() if not name.startswith(ABOUT_TIME)},
            sorted(tuple(group[key] for key in said) for group in groups if group["step"] == line.step),
        )
        for line in read_metrics(run / "metrics.jsonl")
        if "train/reward" in line.values
    }


@pytest.mark.nightly
def test_a_resumed_run_writes_the_journal_of_an_undisturbed_one(
    forked_main: Main, config: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "whole", tmp_path / "resumed"
    words = [["train", config, "--out", run, *SYNCHRONOUS, "--checkpoint.every=3"] for run in runs]
    run_to_its_end(forked_main, *words[0])
    kill_in_the_midst(forked_main, runs[1], list(words[1]), num_updates=5, more_s=0.0)
    run_to_its_end(forked_main, "resume", runs[1])
    whole, resumed = map(logger, runs)
    assert list(whole) == list(resumed) == list(range(1, 11))
    for number, (values, groups) in whole.items():
        others, other_groups = resumed[number]
        assert groups == other_groups, f"update {number}"
        # Which completions are decoded side by side is a matter of time, and so is the last bit of their
        # log-probabilities at the sampler: the trainer computes its own.
        alike = {name: pytest.approx(value, abs=1e-9) for name, value in values.items() if name.startswith("mismatch/")}
        differ = {name: (each, others.get(name)) for name, each in (values | alike).items() if each != others.get(name)}
        assert not differ, f"update {number}"
        assert values.keys() == others.keys(), f"update {number}"
