"""Scoring in child processes that are ended when they take too long, side by side where a judge is slow."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import offbeat_liveness as liveness
from offbeat_data import Prompt, RewardConfig, RewardError, RewardPool, RewardScore, RewardWorker, build_reward
from offbeat_types import ConfigError, DeadlineError

CODE = """
import os, signal, sys, time
def judge(prompt, completion, worth=1.0):
    if completion == "hang":
        time.sleep(600)
    if completion == "die":
        os._exit(9)
    if completion == "raise":
        raise ValueError("no")
    print("users print things")
    return worth * len(prompt.ids)
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
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RewardConfig:
    (tmp_path / "rewards_guarded.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    name = "rewards_guarded:judge"
    return RewardConfig(name=name, function_options={name: {"worth": 0.5}}, timeout_s=30.0)


@pytest.fixture
def prompt() -> Prompt:
    return Prompt(index=3, ids=np.array([4, 5], np.int32), text="日本", answer="12", fields={"level": 1})


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardWorker]:
    """For tests that leave it as they found it: a start takes its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("shared"))
        Path("rewards_guarded.py").write_text(CODE)
        name = "rewards_guarded:judge"
        reward = RewardWorker(RewardConfig(name=name, function_options={name: {"worth": 0.5}}, timeout_s=30.0))
    with reward:
        yield reward


def test_scores_equal_those_of_this_process(shared: RewardWorker, config: RewardConfig, prompt: Prompt) -> None:
    score, plain = shared.score(prompt, "fine"), build_reward(config).score(prompt, "fine")
    assert score == RewardScore(value=plain.value, parts={**plain.parts, "timed_out": 0.0})
    assert score.value == 1.0


def test_what_takes_too_long_is_worth_nothing_and_the_next_is_scored(config: RewardConfig, prompt: Prompt) -> None:
    with RewardWorker(config) as worker:
        worker._config = replace(config, timeout_s=1.0)
        late = worker.score(prompt, "hang")
        assert late == RewardScore(value=0.0, parts={"rewards_guarded:judge": 0.0, "timed_out": 1.0})
        worker._config = config
        assert worker.score(prompt, "fine").value == 1.0


def test_a_child_that_dies_is_named_and_replaced(config: RewardConfig, prompt: Prompt) -> None:
    with RewardWorker(config) as worker:
        with pytest.raises(RewardError, match="ended with code 9 on prompt 3"):
            worker.score(prompt, "die")
        assert worker.score(prompt, "fine").value == 1.0
        for _ in range(2):  # and one killed from outside costs no score
            worker._child.kill()
            assert worker.score(prompt, "fine").value == 1.0


def test_errors_of_the_function_come_back_typed(shared: RewardWorker, prompt: Prompt) -> None:
    with pytest.raises(RewardError, match="rewards_guarded:judge raised ValueError on prompt 3: no"):
        shared.score(prompt, "raise")
    assert shared.score(prompt, "fine").value == 1.0


def test_threads_share_one_worker(shared: RewardWorker, prompt: Prompt) -> None:
    with ThreadPoolExecutor(4) as threads:
        scores = list(threads.map(lambda _: shared.score(prompt, "fine").value, range(4), timeout=30))
    assert scores == [1.0] * 4


def test_a_child_leaves_ctrl_c_to_its_parent(shared: RewardWorker) -> None:
    assert os.getsid(shared._child._process.pid) != os.getsid(0)


def test_settings_that_cannot_work_are_refused_at_the_start(config: RewardConfig) -> None:
    with pytest.raises(ConfigError, match="importing nowhere failed"):
        RewardWorker(RewardConfig(name="nowhere:f"))
    with pytest.raises(ConfigError, match="got neither"):
        RewardWorker(RewardConfig())


def test_a_closed_worker_leaves_nothing_that_a_reward_has_started(prompt: Prompt, tmp_path: Path) -> None:
    """Such a process holds the pipe that its run writes to: whoever reads that would wait for it."""
    (tmp_path / "rewards_forking.py").write_text(
        "import os, time\n"
        "def judge(prompt, completion):\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(600)\n"
        "    return 1.0\n"
    )
    script = (
        "import numpy as np\nfrom offbeat_data import *\n"
        "with RewardWorker(RewardConfig(name='rewards_forking:judge')) as worker:\n"
        "    print(worker.score(Prompt(index=0, ids=np.array([1], np.int32), text='x'), 'y').value)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr


def test_closing_waits_for_no_completion_that_is_being_scored(config: RewardConfig, prompt: Prompt) -> None:
    worker = RewardWorker(replace(config, timeout_s=600.0))
    failed: list[BaseException] = []

    def score() -> None:
        for completion in ("hang", "fine"):  # the next one of the group must not bring the child back
            with pytest.raises(RewardError) as caught:
                worker.score(prompt, completion)
            failed.append(caught.value)

    thread = threading.Thread(target=score)
    thread.start()
    time.sleep(0.3)
    closing = threading.Thread(target=worker.close)
    closing.start()
    for each in (closing, thread):
        each.join(30)
        assert not each.is_alive()
    assert len(failed) == 2
    assert worker._child._process.poll() is not None


def test_a_busy_child_ends_by_itself_when_its_parent_is_killed(config: RewardConfig, tmp_path: Path) -> None:
    script = (
        "import numpy as np\nfrom offbeat_data import *\n"
        "worker = RewardWorker(RewardConfig(name='rewards_guarded:judge', timeout_s=0.01))\n"
        "worker._config = RewardConfig(name='rewards_guarded:judge', timeout_s=600.0)\n"  # never kills it itself
        "print(worker._child._process.pid, flush=True)\n"
        "worker.score(Prompt(index=0, ids=np.array([1], np.int32), text='x'), 'hang')\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(60):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if "Z" in Path(f"/proc/{child}/stat").read_text().split(") ")[1][:1]:  # ended, not yet reaped by init
            return
        time.sleep(0.5)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child outlived its parent by 30 s")


@pytest.mark.nightly
def test_a_child_that_takes_its_time_to_die_shows_its_own_code(
    config: RewardConfig, prompt: Prompt, tmp_path: Path
) -> None:
    name = "rewards_dying:judge"
    (tmp_path / "rewards_dying.py").write_text(
        "import atexit, time\n"
        "def judge(prompt, completion):\n"
        "    atexit.register(time.sleep, 1)\n"  # as much as a traceback and torch's goodbye take on a busy machine
        "    raise SystemExit(7)\n"
    )
    worker = RewardWorker(RewardConfig(name=name, timeout_s=60.0))
    with worker, pytest.raises(RewardError, match="ended with code 7 on prompt 3"):
        worker.score(prompt, "fine")


def test_a_child_that_dies_while_it_starts_is_named(config: RewardConfig, tmp_path: Path) -> None:
    (tmp_path / "rewards_stillborn.py").write_text("raise SystemExit(7)\n")
    with pytest.raises(RewardError, match="ended with code 7 before it was ready"):
        RewardWorker(RewardConfig(name="rewards_stillborn:judge"))


def test_how_long_the_child_may_take_to_start_is_the_callers_choice(config: RewardConfig, tmp_path: Path) -> None:
    (tmp_path / "rewards_slow.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(DeadlineError, match=r"waited 1.5 s for the process that scores.*start_timeout_s"):
        RewardWorker(RewardConfig(name="rewards_slow:judge"), start_timeout_s=1.5)


def test_a_worker_whose_child_did_not_start_again_goes_on_with_the_next(
    config: RewardConfig, prompt: Prompt, tmp_path: Path
) -> None:
    module = tmp_path / "rewards_guarded.py"
    module.write_text(
        "from pathlib import Path\n"
        "starts = Path('starts')\n"
        "starts.write_text(starts.read_text() + 'x' if starts.exists() else 'x')\n"
        "if len(starts.read_text()) == 2:\n    raise SystemExit(7)\n" + module.read_text()
    )
    with RewardWorker(config) as worker:
        with pytest.raises(RewardError, match="ended with code 7 before it was ready"):
            worker.score(prompt, "die")
        assert worker.score(prompt, "fine").value == 1.0


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="processes meet through /proc")
def test_a_function_that_stands_still_is_named_where_the_asking_process_is_watched(
    config: RewardConfig, prompt: Prompt
) -> None:
    found: queue.Queue[liveness.Verdict] = queue.Queue()
    monitor = liveness.watch(stall_after_s=2, name="driver", on_verdict=found.put)
    try:
        with RewardWorker(config) as worker:
            thread = threading.Thread(target=worker.score, args=(prompt, "hang"))
            thread.start()
            verdict = found.get(timeout=60)
            worker._config = replace(config, timeout_s=1.0)
            worker._child.kill()
            thread.join()
    finally:
        monitor.close()
    assert "scorer" in verdict.headline
    assert "reward.score" in verdict.headline
    assert "rewards_guarded.py" in verdict.text


PROMPT = Prompt(index=3, ids=np.array([4, 5], np.int32), text="")


@pytest.fixture
def slow(config: RewardConfig) -> RewardConfig:
    return RewardConfig(name="rewards_guarded:wait", timeout_s=30.0, num_processes=3)


def judges_of(pool: RewardPool, seconds: list[float]) -> set[float]:
    """Pids of those who scored."""
    scores = [pool.submit(PROMPT, str(each)) for each in seconds]
    return {score.value for each in scores if (score := each.result(60.0)) is not None}


@pytest.mark.parametrize("on_error", ["drop", "zero"])
def test_what_cannot_be_scored_costs_one_completion(on_error: str, config: RewardConfig, tmp_path: Path) -> None:
    log, name = tmp_path / "errors.log", "rewards_guarded:moody"
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
    name = "rewards_guarded:moody"
    pool = RewardPool(RewardConfig(name=name, max_error_share=0.01), log=tmp_path / "errors.log")
    assert [pool.submit(PROMPT, "raise").result(60.0) for _ in range(2)] == [None, None]
    with pytest.raises(RewardError, match=r"3 of the last 3 .* reward.max_error_share = 0.01 .*bread.*errors.log"):
        pool.submit(PROMPT, "raise").result(60.0)
    pool.close()
    strict = RewardPool(RewardConfig(name=name, on_error="fail"))
    with pytest.raises(RewardError, match="raised ValueError on prompt 3: no bread today"):
        strict.submit(PROMPT, "raise").result(60.0)
    strict.close()


def test_one_process_serves_a_quick_reward(slow: RewardConfig) -> None:
    pool = RewardPool(slow)
    assert len(judges_of(pool, [0.0] * 20)) == 1
    assert pool.num_scored == 20
    pool.close()


@pytest.mark.nightly
def test_a_slow_judge_gets_as_many_processes_as_there_may_be(slow: RewardConfig) -> None:
    pool = RewardPool(slow)
    assert len(judges_of(pool, [1.5] * 9)) == 3
    pool.close()


def test_nobody_waits_for_what_is_scored_when_the_pool_is_closed(slow: RewardConfig) -> None:
    pool = RewardPool(slow)
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
