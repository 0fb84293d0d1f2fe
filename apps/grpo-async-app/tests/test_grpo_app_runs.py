"""Real runs on a tiny model: trained, killed, resumed, evaluated, and what the run folder then holds."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat_run import RunFolder, read_metrics, read_timeline

Command = Callable[..., Any]
NUM_TRAIN = 20


def trained_prompts(run: Path) -> Counter[str]:
    lines = (run / "generations" / "train.jsonl").read_text().splitlines()
    return Counter(json.loads(line)["prompt"] for line in lines)


def test_a_run_trains_every_prompt_once_and_leaves_all_it_promises(
    command: Command, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = command("train", config, "--out", run)
    assert ended.code == 0, ended.err
    assert sorted(trained_prompts(run).values()) == [1] * NUM_TRAIN
    lines = read_metrics(run / "metrics.jsonl")
    assert [line.step for line in lines if "train/reward" in line.values] == [1, 2, 3, 4, 5]
    assert [line.step for line in lines if "eval/reward" in line.values] == [0, 2, 4, 5]
    assert max(line.values.get("train/lag_max", 0.0) for line in lines) >= 1.0
    tracks = {event["args"]["name"] for event in read_timeline(run / "timeline.json") if event["ph"] == "M"}
    assert {"trainer-0", "rollout-0", "weight sync"} <= tracks
    assert list((run / "tensorboard").iterdir())
    assert (run / "generations" / "validation.jsonl").stat().st_size
    assert "report:" in ended.out
    assert (run / "report.html").stat().st_size > 100_000

    from transformers import AutoModelForCausalLM, AutoTokenizer

    latest = RunFolder.open(run, write=False).checkpoints.latest()
    assert latest is not None
    assert latest.step == 5
    AutoModelForCausalLM.from_pretrained(latest.path)
    AutoTokenizer.from_pretrained(latest.path)

    assert command("eval", run).code == 0


@pytest.mark.parametrize("mode", ["synchronous", "stream", "stale", "decoupled with every extra"])
def test_the_other_modes_train_every_prompt_once_too(command: Command, config: Path, tmp_path: Path, mode: str) -> None:
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
    ended = command("train", config, "--out", tmp_path / "run", "--eval.every_updates=0", *words)
    assert ended.code == 0, ended.err
    assert sorted(trained_prompts(tmp_path / "run").values()) == [1] * NUM_TRAIN


def test_groups_without_signal_are_filtered_and_counted(command: Command, config: Path, tmp_path: Path) -> None:
    words = ["--algorithm.filter_groups=true", "--eval.every_updates=0", "--checkpoint.every=1"]
    ended = command("train", config, "--out", tmp_path / "run", *words)  # a random model is always wrong
    assert ended.code == 0, ended.err
    latest = RunFolder.open(tmp_path / "run", write=False).checkpoints.latest()
    assert latest is not None
    statistics = json.loads((latest.path / "loop" / "state.json").read_text())["policy"]["statistics"]
    assert statistics["filtered"] + statistics["trained"] == NUM_TRAIN
    assert statistics["filtered"] > 0


def start(*words: object) -> "subprocess.Popen[str]":
    line = [sys.executable, "-m", "grpo_async_app", *map(str, words)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def children_of(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in listed.stdout.split()]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("after_step", [1, 3])
def test_a_killed_run_resumes_and_trains_every_prompt_once(
    command: Command, config: Path, tmp_path: Path, after_step: int
) -> None:
    run = tmp_path / "run"
    process = start("train", config, "--out", run, "--checkpoint.every=1")
    try:
        wait_for(lambda: any(line.step >= after_step for line in steps_of(run)), process)
        children = children_of(process.pid)
        assert children
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    wait_for(lambda: not any(is_alive(child) for child in children))

    ended = command("resume", run)
    assert ended.code == 0, ended.err
    assert sorted(trained_prompts(run).values()) == [1] * NUM_TRAIN
    assert [line.step for line in steps_of(run)] == [1, 2, 3, 4, 5]


def test_an_engine_that_is_killed_is_started_again_and_nothing_is_lost(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start("train", config, "--out", run, "--data.epochs=4", "--rollout.num_engines=2")
    try:
        wait_for(lambda: any(line.step >= 1 for line in steps_of(run)), process)
        engine = next(pid for pid in children_of(process.pid) if "rollout-1" in command_of(pid))
        os.kill(engine, signal.SIGKILL)
        output, _ = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert set(trained_prompts(run).values()) == {4}


def test_interrupted_says_how_to_resume(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start("train", config, "--out", run, "--data.epochs=50")
    try:
        wait_for(lambda: any(line.step >= 1 for line in steps_of(run)), process)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert f"resume {run}" in output


def steps_of(run: Path) -> list[Any]:
    return [line for line in read_metrics(run / "metrics.jsonl") if "train/reward" in line.values]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def wait_for(
    condition: Callable[[], bool], process: "subprocess.Popen[str] | None" = None, deadline_s: float = 90.0
) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"the run ended early:\n{process.communicate()[0]}")
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.05)
