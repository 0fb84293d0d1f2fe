"""Rewards side by side: a slow judge gets more processes, a quick one keeps its one."""

import os
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

from offbeat_data import Prompt, RewardConfig, RewardError, RewardPool, RewardScore

CODE = """
import os, signal, sys, time
def judge(prompt, completion):
    time.sleep(float(completion))
    return os.getpid()
def moody(prompt, completion):
    if completion == "exit":
        sys.exit(3)
    if completion == "interrupt":
        signal.raise_signal(signal.SIGINT)
    if completion == "raise":
        raise ValueError("no bread today")
    return {"nan": float("nan"), "none": None, "list": [1], "huge": 10**5000}.get(completion, 1.0)
"""
PROMPT = Prompt(index=3, ids=np.array([4, 5], np.int32), text="")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RewardConfig:
    (tmp_path / "rewards_pooled.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return RewardConfig(name="rewards_pooled:judge", timeout_s=30.0, num_processes=3)


def judges_of(pool: RewardPool, seconds: list[float]) -> set[float]:
    """Pids of those who scored."""
    scores = [pool.submit(PROMPT, str(each)) for each in seconds]
    return {score.value for each in scores if (score := each.result(60.0)) is not None}


@pytest.mark.parametrize("on_error", ["drop", "zero"])
def test_what_cannot_be_scored_costs_one_completion(on_error: str, config: RewardConfig, tmp_path: Path) -> None:
    log, name = tmp_path / "errors.log", "rewards_pooled:moody"
    pool = RewardPool(RewardConfig(name=name, on_error=on_error), log=log)
    bad = ["nan", "none", "list", "huge", "raise", "exit", "interrupt"]
    scores = {text: pool.submit(PROMPT, text).result(60.0) for text in (*bad, "fine")}
    fine = scores.pop("fine")
    assert fine is not None
    assert fine.value == 1.0
    given_up = None if on_error == "drop" else RewardScore(value=0.0, parts={name: 0.0, "failed": 1.0})
    assert scores == dict.fromkeys(bad, given_up)
    assert pool.num_scored == 8
    assert "the process that scores ended with code" in pool.last_error
    kept = log.read_text()
    assert 'in moody\n    raise ValueError("no bread today")' in kept
    assert kept.count("RewardError:") >= len(bad)
    pool.close()


def test_a_run_ends_when_too_many_cannot_be_scored_or_none_may(config: RewardConfig, tmp_path: Path) -> None:
    name = "rewards_pooled:moody"
    pool = RewardPool(RewardConfig(name=name, max_error_share=0.01), log=tmp_path / "errors.log")
    assert [pool.submit(PROMPT, "raise").result(60.0) for _ in range(2)] == [None, None]
    with pytest.raises(RewardError, match=r"3 of the last 3 .* reward.max_error_share = 0.01 .*bread.*errors.log"):
        pool.submit(PROMPT, "raise").result(60.0)
    pool.close()
    strict = RewardPool(RewardConfig(name=name, on_error="fail"))
    with pytest.raises(RewardError, match="raised ValueError on prompt 3: no bread today"):
        strict.submit(PROMPT, "raise").result(60.0)
    strict.close()


def test_one_process_serves_a_quick_reward(config: RewardConfig) -> None:
    pool = RewardPool(config)
    assert len(judges_of(pool, [0.0] * 20)) == 1
    assert pool.num_scored == 20
    pool.close()


def test_a_slow_judge_gets_as_many_processes_as_there_may_be(config: RewardConfig) -> None:
    pool = RewardPool(config)
    assert len(judges_of(pool, [1.5] * 9)) == 3
    pool.close()


def test_nobody_waits_for_what_is_scored_when_the_pool_is_closed(config: RewardConfig) -> None:
    pool = RewardPool(config)
    [pid] = judges_of(pool, [0.0])
    waiting = [pool.submit(PROMPT, "600") for _ in range(5)]
    while not waiting[0].running():
        pass
    pool.close()
    for each in waiting:
        with pytest.raises((RewardError, CancelledError)):
            each.result(10.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
