"""Scorers: processes that are ended when a completion takes too long, side by side where a judge is slow."""

import asyncio
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import offbeat_liveness as liveness
from grpo_async_app._roles.scorer import ScorerAsk
from grpo_async_app._scoring.pool import ScorerPool
from grpo_async_app._scoring.scoring_metrics import ScoringMetrics
from offbeat_actors import ClusterConfig, RoleOnCall
from offbeat_core import ConfigError, DeadlineError
from offbeat_data import CompletionText, Picture, Prompt, RewardConfig, RewardError, RewardScore, build_reward
from offbeat_testing import wait_until_gone

CODE = r"""
import asyncio, os, signal, sys, time
def judge(prompt, completion, scale=1.0):
    if completion == "hang":
        time.sleep(600)
    if completion == "die":
        os._exit(9)
    if completion == "raise":
        raise ValueError("no")
    if completion == "half":
        raise ValueError("no \ud83d")
    print("users print things")
    return scale * len(prompt.ids)
def wait(prompt, completion):
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
def busy(prompt, completion):
    def ring(*_):
        raise TimeoutError
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        time.sleep(60)
    except TimeoutError:
        return asyncio.run(asyncio.sleep(0.01, prompt.fields["large"] % 10))
def forking(prompt, completion):
    if os.fork() == 0:
        time.sleep(600)
    return 1.0
def exiting(prompt, completion):
    raise SystemExit(7)
"""
PROMPT = Prompt(index=3, ids=np.array([4, 5], np.int32), text="日本", answer="12", fields={"large": 10**30 + 4})
NAME = "rewards_guarded:judge"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RewardConfig:
    (tmp_path / "rewards_guarded.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())  # where a reward is built, this folder is added for good
    return RewardConfig(name=NAME, function_options={NAME: {"scale": 0.5}}, timeout_s=30.0)


def reward_of(function: str, **settings: Any) -> RewardConfig:
    return RewardConfig(name=f"rewards_guarded:{function}", **settings)


@asynccontextmanager
async def scoring(
    config: RewardConfig, log: Path | None = None, start_timeout_s: float = 60.0
) -> AsyncIterator[ScorerPool]:
    pool = ScorerPool(config, ClusterConfig(start_timeout_s=start_timeout_s), log)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), 90))

    return run


def scorer_pids(pool: ScorerPool) -> list[int]:
    return [actor.pid for actor in pool.starter._launcher._actors.values()]


def written(texts: list[str]) -> list[CompletionText]:
    return [CompletionText(text=text) for text in texts]


async def values_of(pool: ScorerPool, *completions: str) -> list[float | None]:
    scores = await asyncio.gather(*(score_of(pool, each) for each in completions))
    return [None if score is None else score.value for score in scores]


async def score_of(pool: ScorerPool, completion: str) -> RewardScore | None:
    [score] = await pool.score(PROMPT, written([completion]))
    return score


@in_loop
async def test_scores_are_those_of_this_process_and_errors_come_back_typed(config: RewardConfig) -> None:
    async with scoring(config) as pool:
        score, plain = await pool.judge(PROMPT, "fine"), build_reward(config).score(PROMPT, "fine")
        assert score == RewardScore(value=plain.value, parts={**plain.parts, "timed_out": 0.0})
        for completion, text in (("raise", "no"), ("half", r"no \\ud83d")):
            with pytest.raises(RewardError, match=f"{NAME} raised ValueError on prompt 3: {text}$") as caught:
                await pool.judge(PROMPT, completion)
            assert "in judge\n    raise ValueError" in caught.value.__notes__[0]
        assert await values_of(pool, *["fine"] * 4) == [1.0] * 4
        [pid] = scorer_pids(pool)
        assert os.getsid(pid) != os.getsid(0), "Ctrl-C is for the process that started it"


@in_loop
async def test_a_function_has_the_main_thread_and_may_use_signals_and_event_loops(config: RewardConfig) -> None:
    async with scoring(reward_of("busy")) as pool:
        assert await values_of(pool, "", "") == [4.0, 4.0]


def test_a_scorer_is_sent_no_picture() -> None:
    prompt = replace(PROMPT, pictures=(Picture(data=b"", height=8, width=8),))
    assert sorted(json.loads(prompt.to_json())) == [
        *("answer", "answer_column", "column", "escaped", "fields", "ids", "index", "text"),
    ]


@in_loop
async def test_what_takes_too_long_is_worth_nothing_and_costs_itself_alone(config: RewardConfig) -> None:
    async with scoring(replace(config, timeout_s=1.0)) as pool:
        [slow] = scorer_pids(pool)
        late = asyncio.create_task(pool.judge(PROMPT, "hang"))
        await asyncio.sleep(0.1)
        pool._blocking._config = config
        assert await values_of(pool, *["fine"] * 3) == [1.0] * 3
        assert await late == RewardScore(value=0.0, parts={NAME: 0.0, "timed_out": 1.0})
        wait_until_gone([slow], 0.1)


@in_loop
async def test_one_call_scores_a_group_where_that_is_quick_and_each_counts_alone_where_it_is_not(
    config: RewardConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    call = RoleOnCall.call

    async def noted(role: RoleOnCall, method: str, ask: ScorerAsk, **settings: Any) -> Any:
        asked.append(len(ask.texts))
        return await call(role, method, ask, **settings)

    monkeypatch.setattr(RoleOnCall, "call", noted)
    async with scoring(replace(config, timeout_s=1.0, on_error="drop")) as pool:
        scores = await pool.score(PROMPT, written(["fine"] * 8 + ["raise"]))
        assert [score and score.value for score in scores] == [1.0] * 8 + [None]
        assert asked == [9]
        scores = await pool.score(PROMPT, written(["fine", "hang", "raise", "die", "fine"]))
        assert [score and score.value for score in scores] == [1.0, 0.0, None, None, 1.0]
        assert [score.parts["timed_out"] for score in scores if score] == [0.0, 1.0, 0.0]
    async with scoring(reward_of("wait", num_processes=1)) as pool:
        asked.clear()
        scores = await pool.score(PROMPT, written(["0.2", "0", "0"]))
        assert (len([score for score in scores if score]), asked) == (3, [3, 1, 1])
        slow = asyncio.create_task(pool.score(PROMPT, written(["0.2"] * 3)))
        counted = set()
        while not slow.done():
            await asyncio.sleep(0.05)
            counted.add(pool.num_scored)
        assert len(counted) > 2, "each is counted when it is judged, so progress can be seen"


@in_loop
async def test_a_scorer_that_dies_is_named_and_replaced(config: RewardConfig) -> None:
    async with scoring(config) as pool:
        with pytest.raises(RewardError, match="scorer-0: its process exited with code 9 on prompt 3"):
            await pool.judge(PROMPT, "die")
        assert await values_of(pool, "fine") == [1.0]
        for _ in range(2):  # and one killed from outside costs no score
            pool.kill()
            assert await values_of(pool, "fine") == [1.0]
    async with scoring(reward_of("exiting")) as pool:
        with pytest.raises(RewardError, match="exited with code 7 on prompt 3"):
            await pool.judge(PROMPT, "fine")


@in_loop
async def test_whoever_no_longer_waits_leaves_the_scorer_its_time(config: RewardConfig) -> None:
    async with scoring(reward_of("wait", num_processes=1)) as pool:
        abandoned = asyncio.create_task(pool.score(PROMPT, written(["1"])))
        await asyncio.sleep(0.3)
        abandoned.cancel()
        [pid] = await values_of(pool, "0")
        assert scorer_pids(pool) == [pid]


@in_loop
async def test_settings_that_cannot_work_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="importing nowhere failed"):
        await ScorerPool(RewardConfig(name="nowhere:f"), ClusterConfig()).start()
    with pytest.raises(ConfigError, match="got neither"):
        await ScorerPool(RewardConfig(), ClusterConfig()).start()


SCRIPT = """
import asyncio, numpy as np
from grpo_async_app._scoring.scoring_metrics import ScoringMetrics
from grpo_async_app._scoring.pool import ScorerPool
from offbeat_actors import ClusterConfig
from offbeat_data import CompletionText, Prompt, RewardConfig
async def main():
    pool = ScorerPool(RewardConfig(name="rewards_guarded:{function}", timeout_s=600.0), ClusterConfig())
    await pool.start()
    print(*(actor.pid for actor in pool.starter._launcher._actors.values()), flush=True)
    [score] = await pool.score(Prompt(index=0, ids=np.array([1], np.int32), text="x"), [CompletionText(text="hang")])
    print(score.value)
    await pool.close()
asyncio.run(main())
"""


def test_a_closed_pool_leaves_nothing_that_a_reward_has_started(config: RewardConfig) -> None:
    """Such a process holds the pipe that its run writes to: a reader of that would wait for it."""
    command = [sys.executable, "-c", SCRIPT.format(function="forking")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()[1:]) == (0, ["1.0"]), done.stderr


def test_a_busy_scorer_ends_by_itself_when_its_driver_is_killed(config: RewardConfig) -> None:
    command = [sys.executable, "-c", SCRIPT.format(function="judge")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        scorer = int(driver.stdout.readline())
        driver.kill()
        driver.wait()
    wait_until_gone([scorer], 30)


@in_loop
async def test_nobody_waits_for_what_is_scored_when_the_pool_is_closed(config: RewardConfig) -> None:
    async with scoring(reward_of("wait", timeout_s=600.0, num_processes=3)) as pool:
        [pid] = await values_of(pool, "0")
        waiting = [asyncio.create_task(pool.score(PROMPT, written(["600"]))) for _ in range(5)]
        await asyncio.sleep(0.3)
        begun_s = time.monotonic()
        await pool.close()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert time.monotonic() - begun_s < 10
        assert [type(outcome) for outcome in outcomes] == [RewardError] * 5
        with pytest.raises(RewardError, match="closed"):  # the next one must not bring it back
            await pool.score(PROMPT, written(["0"]))
        assert pid is not None
        wait_until_gone([int(pid)], 0.1)
        assert pool.num_scored == 1


@in_loop
async def test_a_scorer_that_dies_while_it_starts_is_named(config: RewardConfig, tmp_path: Path) -> None:
    (tmp_path / "rewards_stillborn.py").write_text("raise SystemExit(7)\n")
    with pytest.raises(RewardError, match="scorer-0: its process exited with code 7 before it was ready"):
        await ScorerPool(RewardConfig(name="rewards_stillborn:judge"), ClusterConfig()).start()


@in_loop
async def test_how_long_a_scorer_may_take_to_start_is_a_setting(config: RewardConfig, tmp_path: Path) -> None:
    (tmp_path / "rewards_slow.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(DeadlineError, match=r"waited 1.5 s for scorer-0.*raise cluster.start_timeout_s"):
        await ScorerPool(RewardConfig(name="rewards_slow:judge"), ClusterConfig(start_timeout_s=1.5)).start()


@in_loop
async def test_a_scorer_that_did_not_start_again_is_started_for_the_next(config: RewardConfig, tmp_path: Path) -> None:
    module = tmp_path / "rewards_guarded.py"
    module.write_text(
        "from pathlib import Path\n"
        "starts = Path('starts')\n"
        "starts.write_text(starts.read_text() + 'x' if starts.exists() else 'x')\n"
        "if len(starts.read_text()) == 2:\n    raise SystemExit(7)\n" + module.read_text()
    )
    async with scoring(config) as pool:
        with pytest.raises(RewardError, match="exited with code 7 before it was ready"):
            await pool.judge(PROMPT, "die")
        assert await values_of(pool, "fine") == [1.0]


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="processes meet through /proc")
@in_loop
async def test_a_function_that_stands_still_is_named_where_the_driver_is_watched(config: RewardConfig) -> None:
    found: queue.Queue[liveness.Verdict] = queue.Queue()
    monitor = liveness.watch(stall_after_s=2, name="driver", on_verdict=found.put)
    try:
        async with scoring(config) as pool:
            hanging = asyncio.create_task(pool.judge(PROMPT, "hang"))
            verdict = await asyncio.to_thread(found.get, timeout=60)
            hanging.cancel()
    finally:
        monitor.close()
    assert "scorer-0.score" in verdict.headline
    assert "rewards_guarded.py" in verdict.text


@pytest.mark.parametrize("on_error", ["drop", "zero"])
@in_loop
async def test_what_cannot_be_scored_costs_one_completion(on_error: str, config: RewardConfig, tmp_path: Path) -> None:
    log, name = tmp_path / "errors.log", "rewards_guarded:moody"
    bad = ["nan", "none", "list", "huge", "raise", "exit", "interrupt"]
    async with scoring(reward_of("moody", on_error=on_error), log) as pool:
        scores = {text: await score_of(pool, text) for text in (*bad, "fine")}
        fine = scores.pop("fine")
        assert fine is not None
        assert fine.value == 1.0
        given_up = None if on_error == "drop" else RewardScore(value=0.0, parts={name: 0.0, "failed": 1.0})
        assert scores == dict.fromkeys(bad, given_up)
        assert pool.num_scored == 8
        assert "its process exited with code" in pool.last_error
    kept = log.read_text()
    assert 'in moody\n    raise ValueError("no bread today")' in kept
    assert len(re.findall(r"^offbeat_data\._scoring\.functions\.\w+Error: ", kept, re.MULTILINE)) >= len(bad)


@in_loop
async def test_a_run_ends_when_too_many_cannot_be_scored_or_none_may(config: RewardConfig, tmp_path: Path) -> None:
    async with scoring(reward_of("moody", max_error_share=0.01), tmp_path / "errors.log") as pool:
        assert [await score_of(pool, "raise") for _ in range(2)] == [None, None]
        with pytest.raises(RewardError, match=r"3 of the last 3 .* reward.max_error_share = 0.01 .*bread.*errors.log"):
            await score_of(pool, "raise")
    async with scoring(reward_of("moody", on_error="fail")) as pool:
        with pytest.raises(RewardError, match="raised ValueError on prompt 3: no bread today"):
            await score_of(pool, "raise")


def test_completions_of_long_ago_that_could_not_be_scored_end_no_run() -> None:
    """At most 1 % of the last 200 may be so."""
    pool = ScorerPool(RewardConfig(name="exact_match", max_error_share=0.01), ClusterConfig())
    sound, failed = RewardScore(value=1.0, parts={}), RewardError("no bread today")
    for judged in (failed, failed, *[sound] * 199, failed, failed):
        pool._counted(judged)
    with pytest.raises(RewardError, match="3 of the last 200 completions could not be scored"):
        pool._counted(failed)


@in_loop
async def test_one_scorer_serves_a_quick_reward(config: RewardConfig) -> None:
    async with scoring(reward_of("wait", num_processes=3)) as pool:
        assert len(set(await values_of(pool, *["0"] * 20))) == 1
        assert pool.num_scored == 20


@pytest.mark.nightly
@in_loop
async def test_a_slow_judge_gets_as_many_scorers_as_there_may_be(config: RewardConfig) -> None:
    async with scoring(reward_of("wait", num_processes=3)) as pool:
        assert len(set(await values_of(pool, *["1.5"] * 9))) == 3


WAITING = r"""
import asyncio, os, time
async def ask(prompt, completion):
    if completion == "hang":
        await asyncio.sleep(600)
    if completion == "block":
        time.sleep(600)
    if completion == "raise":
        raise ValueError("no")
    await asyncio.sleep(float(completion))
    return os.getpid()
def longest(prompt, completions):
    if "hang" in completions:
        time.sleep(600)
    if "die" in completions:
        os._exit(9)
    return [float(len(each) == max(map(len, completions))) for each in completions]
def trl_length(completions, **columns):
    if "hang" in completions:
        time.sleep(600)
    if len(completions) > 1 and "sour" in completions:
        raise ValueError("spoils the batch")
    return [float(len(each)) for each in completions]
"""


@pytest.fixture
def waiting(config: RewardConfig, tmp_path: Path) -> None:
    (tmp_path / "rewards_waiting.py").write_text(WAITING)


def waiting_for(function: str, **settings: Any) -> RewardConfig:
    return RewardConfig(name=f"rewards_waiting:{function}", **settings)


@in_loop
async def test_many_wait_side_by_side_in_one_process_and_the_gauge_tells_how_long(waiting: None) -> None:
    async with scoring(waiting_for("ask", timeout_s=60.0, concurrency=8)) as pool:
        await pool.score(PROMPT, written(["0"]))
        pool.metrics()
        begun_s = time.monotonic()
        asked = asyncio.create_task(pool.score(PROMPT, written(["1.0"] * 16)))
        await asyncio.sleep(0.5)
        assert pool.metrics()["scoring/queue"].value == 8.0
        scores = await asked
        assert len({score.value for score in scores if score}) == 1, "one process"
        assert time.monotonic() - begun_s < 10, "one after the other it would be 16 s"
        metrics = pool.metrics()
        assert 0.9 <= metrics["scoring/latency_p50_s"].value <= metrics["scoring/latency_max_s"].value < 10
        assert 0.3 < metrics["scoring/busy_share"].value <= 0.51, "of two processes one is busy"
        assert (metrics["scoring/queue"].value, metrics["scoring/processes"].value) == (0.0, 2.0)


def test_latencies_are_those_of_completions_whatever_groups_they_came_in(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("grpo_async_app._scoring.scoring_metrics.time", SimpleNamespace(monotonic=lambda: now_s))
    gauge = ScoringMetrics()
    for num_completions, seconds in ((1, 100.0), (94, 1.0), (5, 10.0)):
        with gauge.scoring(num_completions):
            now_s += seconds
    metrics = gauge.lap()
    found = [metrics[f"scoring/latency_{name}_s"] for name in ("p50", "p95", "max")]
    assert [each.value for each in found] == [1.0, 10.0, 100.0]
    assert [each.weight for each in found[:2]] == [100.0, 100.0]
    assert "scoring/latency_p50_s" not in gauge.lap(), "they are reported once"


@pytest.mark.nightly
@in_loop
async def test_what_hangs_while_others_wait_costs_itself_alone_blocking_or_not(waiting: None) -> None:
    async with scoring(waiting_for("ask", timeout_s=6.0)) as pool:
        scores = await pool.score(PROMPT, written(["0", "hang", "raise", "0.2"]))
        assert [None if score is None else score.parts["timed_out"] for score in scores] == [0.0, 1.0, None, 0.0]
        scores = await pool.score(PROMPT, written(["0", "block", "4.0"]))
        assert [score and score.parts["timed_out"] for score in scores] == [0.0, 1.0, 0.0]
        assert pool.metrics()["scoring/restarts"].value >= 1
        assert await values_of(pool, "0") != [0.0], "and it continues"


@in_loop
async def test_what_compares_gets_whole_groups_and_what_only_takes_lists_is_split_where_that_helps(
    waiting: None,
) -> None:
    async with scoring(waiting_for("longest", timeout_s=3.0)) as pool:
        scores = await pool.score(PROMPT, written(["a", "ccc", "bb"]))
        assert [score and score.value for score in scores] == [0.0, 1.0, 0.0]
        scores = await pool.score(PROMPT, written(["a", "hang"]))
        assert [score and score.parts["timed_out"] for score in scores] == [1.0, 1.0], "they cannot be distinguished"
        assert await pool.score(PROMPT, written(["a", "die"])) == [None, None]
        assert "exited with code 9 on prompt 3" in pool.last_error
    weights = {"rewards_waiting:trl_length": 1.0, "rewards_waiting:longest": 10.0}
    async with scoring(RewardConfig(weights=weights, timeout_s=3.0)) as pool:
        scores = await pool.score(PROMPT, written(["a", "sour", "bb"]))
        assert [score and score.value for score in scores] == [1.0, 14.0, 2.0]
    async with scoring(waiting_for("trl_length", timeout_s=3.0)) as pool:
        scores = await pool.score(PROMPT, written(["a", "hang", "bb"]))
        assert [score and (score.value, score.parts["timed_out"]) for score in scores] == [(1, 0), (0, 1), (2, 0)]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap on this machine")
@in_loop
async def test_programs_of_a_model_run_in_scorers_and_one_that_hangs_costs_itself() -> None:
    config = RewardConfig(name="code", code={"timeout_s": 5.0}, timeout_s=20.0, num_processes=2)
    prompt = replace(PROMPT, fields={"tests": ["assert double(2) == 4"]})
    async with scoring(config) as pool:
        right, wrong = "def double(x):\n    return 2 * x", "def double(x):\n    return x"
        scores = await pool.score(prompt, written([right, wrong, "while True:\n    pass", right]))
    assert [score and score.value for score in scores] == [1.0, 0.0, 0.0, 1.0]
    assert [score.parts["timed_out"] for score in scores if score] == [0.0] * 4, "each has a limit of its own"
