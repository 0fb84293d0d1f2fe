"""Rewards that print, exit, leave children behind or look for secrets, and the processes that they run in."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from grpo_async_app._run.ending import UntrainedGroups
from grpo_async_app._scoring.error_share import ErrorShare
from grpo_async_app._scoring.pool import ScorerPool
from grpo_async_app._scoring.trial import try_reward
from offbeat_actors import ClusterConfig
from offbeat_data import CompletionText, Prompt, RewardConfig, RewardScore

pytestmark = pytest.mark.timeout(600)
LONGEST_S = 240.0
"""Children of rewards would last two hours; a scorer starts in one second, and in tens of them on a busy machine."""
PROMPT = Prompt(index=3, ids=np.array([4, 5], np.int32), text="3 + 4?", answer="7")
CODE = """
import json, os, pathlib, subprocess, sys, time

FOLDER = pathlib.Path(__file__).parent
child = None

def prints(prompt, completion):
    print("\\x1b[2Jhello from the reward" + "x" * 1_000_000)
    return 1.0

def exits(prompt, completion):
    if completion == "slowly":
        time.sleep(1)
    sys.exit(3)

def leaves_children(prompt, completion):
    global child
    if child is None:
        child = os.fork()
        if child == 0:
            os.setsid()
            time.sleep(7200)
            os._exit(0)
        quiet = "start_new_session=True, stdout=subprocess.DEVNULL"
        text = f"import subprocess; print(subprocess.Popen(['sleep', '7200'], {quiet}).pid)"
        daemon = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, check=True).stdout
        (FOLDER / "children").write_text(f"{child} {daemon}")
    return 1.0

def shows(prompt, completion):
    (FOLDER / "environment").write_text(json.dumps(dict(os.environ)))
    return 1.0

def pays(prompt, completion):
    return float(completion)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(CODE)
    return path


def reward_of(own: Path, function: str, **settings: object) -> RewardConfig:
    return RewardConfig(name=f"{own}:{function}", **settings)  # type: ignore[arg-type]


def scored(config: RewardConfig, texts: list[str], log: Path, notices: list[str]) -> list[RewardScore | None]:
    async def scenario() -> list[RewardScore | None]:
        pool = ScorerPool(config, ClusterConfig(), log, notify=notices.append)
        try:
            await pool.start()
            return [score for text in texts for score in await pool.score(PROMPT, [CompletionText(text=text)])]
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(scenario(), LONGEST_S))


def test_what_a_reward_prints_is_bounded_named_and_shown_once(
    own: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    notices: list[str] = []
    scores = scored(reward_of(own, "prints"), ["a"] * 12, tmp_path / "logs" / "reward_errors.log", notices)
    assert all(score and score.value == 1.0 for score in scores)
    [line] = notices
    assert line.startswith("scorer-0 prints: [2Jhello from the rewardxxx")
    assert line.endswith("x; all that rewards print is in " + str(tmp_path / "logs" / "scorer-*.log"))
    assert len(line) < 300 + len(str(tmp_path))
    log = (tmp_path / "logs" / "scorer-0.log").read_text()
    assert 4 << 20 < len(log) < (4 << 20) + (65 << 10)
    assert "bytes left out]" in log
    assert "".join(capfd.readouterr()) == ""


EXITS = """
import asyncio, sys
from pathlib import Path
from grpo_async_app._scoring.pool import ScorerPool
from offbeat_actors import ClusterConfig
from offbeat_data import CompletionText, RewardConfig
from test_grpo_app_reward_processes import PROMPT

async def main():
    folder = Path(sys.argv[1])
    pool = ScorerPool(RewardConfig(name=f"{folder}/own.py:exits", num_processes=4), ClusterConfig(), folder / "e.log")
    await pool.start()
    for _ in range(2):
        await pool.score(PROMPT, [CompletionText(text="at once")] * 2)
    print(pool.last_error)
    slow = [asyncio.create_task(pool.score(PROMPT, [CompletionText(text="slowly")])) for _ in range(4)]
    await asyncio.sleep(0.3)
    for each in slow:
        each.cancel()
    await pool.close()

asyncio.run(main())
"""


def test_a_reward_that_exits_is_named_and_nothing_is_said_of_scorers_that_the_run_has_ended(own: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-X", "dev", "-c", EXITS, str(own.parent)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=LONGEST_S, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"scorer-[0-3]: its process exited with code 3 on prompt 3; see ", done.stdout), done.stdout
    for wrong in ("never retrieved", "SIGKILL", "Traceback", "log above"):
        assert wrong not in done.stdout + done.stderr


def children_of(own: Path) -> list[int]:
    return [int(pid) for pid in (own.parent / "children").read_text().split()]


def test_children_of_a_reward_delay_neither_its_trial_nor_its_end_and_are_ended(own: Path, tmp_path: Path) -> None:
    assert "works" in try_reward(reward_of(own, "leaves_children"), PROMPT, ClusterConfig())
    of_trial = children_of(own)
    assert not [pid for pid in of_trial if Path(f"/proc/{pid}").exists()]
    assert scored(reward_of(own, "leaves_children"), ["a"], tmp_path / "reward_errors.log", [])
    assert children_of(own) != of_trial
    assert not [pid for pid in children_of(own) if Path(f"/proc/{pid}").exists()]


def test_a_reward_sees_no_secret_but_those_that_it_is_given(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "SEARCH_KEY", "JUDGE_API_KEY", "COLOUR"):
        monkeypatch.setenv(name, f"value of {name}")
    judge = {"url": "http://127.0.0.1:9/v1", "model": "m", "key_env": "JUDGE_API_KEY", "pattern": "(\\d)"}
    weights = {f"{own}:shows": 1.0, "judge": 1.0}
    config = RewardConfig(weights=weights, judge=judge, forward_env=["SEARCH_KEY"])
    scored(config, ["a"], tmp_path / "reward_errors.log", [])
    seen = json.loads((tmp_path / "environment").read_text())
    assert (seen["SEARCH_KEY"], seen["COLOUR"]) == ("value of SEARCH_KEY", "value of COLOUR")
    assert not {"HF_TOKEN", "JUDGE_API_KEY"} & seen.keys()


def test_a_reward_out_of_range_is_an_error_of_its_sample(own: Path, tmp_path: Path) -> None:
    config = reward_of(own, "pays", lowest=-1.0, highest=2.0)
    log = tmp_path / "reward_errors.log"
    scores = scored(config, ["2", "-1", "2.5", "1e300"], log, [])
    assert [score and score.value for score in scores] == [2.0, -1.0, None, None]
    assert log.read_text().count("must be in [-1, 2] (reward.lowest, reward.highest)") == 2


def test_a_run_ends_when_more_than_the_share_of_the_last_200_has_failed() -> None:
    share = ErrorShare("agent.max_error_share", 0.1)
    for _ in range(20):
        share.add(failed=True)
    assert share.complaint("episodes were lost") == ""
    share.add(failed=True)
    assert share.complaint("episodes were lost") == (
        "21 of the last 21 episodes were lost, more than agent.max_error_share = 0.1 allows"
    )
    for _ in range(180):
        share.add(failed=False)
    assert share.complaint("episodes were lost") == "", "the first of them is forgotten"


def test_groups_that_failed_are_not_said_to_teach_nothing() -> None:
    groups = UntrainedGroups()
    groups.note(trained=False, lost=False)
    assert groups.reason("no learning signal") == "no learning signal"
    groups.note(trained=False, lost=True)
    assert "of the last 2 prompt groups 1 were lost with samples that failed" in groups.reason("no learning signal")
    groups.note(trained=True, lost=False)
    assert (groups.num_lost, groups.num_equal) == (0, 0)
