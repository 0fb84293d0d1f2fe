"""Rewards side by side: a slow judge gets more processes, a quick one keeps its one."""

import os
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

from offbeat_data import Prompt, RewardConfig, RewardError, RewardPool

CODE = """
import os, time
def judge(prompt, completion):
    time.sleep(float(completion))
    return os.getpid()
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
    return {score.result(60.0).value for score in scores}


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
