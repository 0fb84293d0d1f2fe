"""Which environment a configuration names, and that one that breaks ends its own episode and no other."""

import asyncio
import json
import re
import signal
import socket
import sys
import threading
import time

import numpy as np
import pytest

from offbeat_core import ConfigError
from offbeat_data import (
    DataConfig,
    EnvironmentConfig,
    EnvironmentFailedError,
    EpisodeHost,
    Prompt,
    RewardScore,
    ToolEnvironment,
    build_environment,
    load_prompts,
    load_tokenizer,
)

OWN = """
class Own:
    def __init__(self, size=1):
        self.size = size

    async def reset(self, prompt): pass
    async def step(self, text): return None
    async def reward(self): return None
    async def close(self): pass

value = 7
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_environment.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_environment", raising=False)
    return "own_environment"


def test_every_episode_gets_an_environment_of_its_own(own):
    make = build_environment(EnvironmentConfig(name=f"{own}:Own", options={"size": 3}))
    first, second = make(), make()
    assert first is not second
    assert first.size == 3
    assert isinstance(build_environment(EnvironmentConfig(name="calculator"))(), ToolEnvironment)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("nowhere_at_all:Own", {}, "environment nowhere_at_all:Own: importing nowhere_at_all failed"),
        ("own_environment:Pwn", {}, "has no function 'Pwn'; nearest: Own"),
        ("own_environment:value", {}, "has no function 'value'"),
        ("own_environment:Own", {"sise": 3}, "environment.options: own_environment:Own refuses"),
        ("calculator", {"pattern": "("}, "not a regular expression"),
        ("reasoning_gym", {"attempts": 0}, "attempts must be at least 1"),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_starts(name, options, text, own):
    with pytest.raises(ConfigError, match=text):
        build_environment(EnvironmentConfig(name=name, options=options))


@pytest.mark.parametrize(
    ("settings", "has_reward", "text"),
    [
        ({"name": "calculater"}, True, "no environment 'calculater'; perhaps calculator"),
        ({"max_turns": 3}, True, "no effect without environment.name"),
        ({"name": "calculator"}, False, "leaves the last turn to this section"),
        ({"name": "reasoning_gym"}, True, "judges by itself"),
    ],
)
def test_settings_that_do_nothing_or_lack_something_are_refused(settings, has_reward, text):
    with pytest.raises(ConfigError, match=text):
        EnvironmentConfig(**settings).check(has_reward=has_reward)


@pytest.mark.parametrize(
    ("name", "has_reward"), [("", True), ("calculator", True), ("verifiers", False), ("a:b", True), ("a:b", False)]
)
def test_settings_that_fit_pass(name, has_reward):
    EnvironmentConfig(name=name).check(has_reward=has_reward)


def _problem(make_tokenizer):
    config = DataConfig(path="reasoning-gym:chain_sum", num_items=1, max_prompt_tokens=9000)
    return load_prompts(config, make_tokenizer("chatml")).train[0]


async def _play(environment, prompt, *texts):
    await environment.reset(prompt)
    answers = [await environment.step(text) for text in texts]
    score = await environment.reward()
    await environment.close()
    return answers, score


def test_a_task_of_reasoning_gym_may_be_tried_again(make_tokenizer):
    prompt = _problem(make_tokenizer)
    make = build_environment(EnvironmentConfig(name="reasoning_gym", options={"attempts": 3, "tag": "answer"}))
    right = f"so <answer>{prompt.answer}</answer>"
    again = [{"role": "user", "content": "That is not right. Try again."}]

    answers, score = asyncio.run(_play(make(), prompt, "no idea", "<answer>x</answer>", right))
    assert answers == [again, again, None]
    assert score == RewardScore(value=1.0, parts={"reasoning_gym": 1.0, "unreadable": 0.0})

    answers, score = asyncio.run(_play(make(), prompt, right))
    assert answers == [None]
    assert score is not None
    assert score.value == 1.0

    answers, score = asyncio.run(_play(make(), prompt, "a", "b", "c"))
    assert answers == [again, again, None]
    assert score is not None
    assert score.value < 1.0


def test_once_asked_it_scores_as_the_reward_of_that_name_does(make_tokenizer):
    from offbeat_data import RewardConfig, build_reward

    prompt = _problem(make_tokenizer)
    reward = build_reward(RewardConfig(name="reasoning_gym"))
    for text in (str(prompt.answer), "-1", "no idea"):
        environment = build_environment(EnvironmentConfig(name="reasoning_gym"))()
        assert asyncio.run(_play(environment, prompt, text)) == ([None], reward.score(prompt, text))


def test_tools_of_a_row_reach_the_template(copied_folder, write_jsonl):
    folder = copied_folder("chatml", {"chat_template.jinja": "{{ tools | tojson }}{{ messages[0]['content'] }}"})
    tools = [{"type": "function", "function": {"name": "add"}}]
    path = write_jsonl([{"prompt": "2+2", "answer": "4", "tools": tools}, {"prompt": "1+1", "answer": "2"}])
    with_tools, without = load_prompts(DataConfig(path=path), load_tokenizer(folder)).train
    assert with_tools.text == json.dumps(tools) + "2+2"
    assert without.text == "null1+1"


PROMPT = Prompt(index=0, ids=np.array([1], np.int32), text="?", answer="12")
STEP_TIMEOUT_S = 0.3
PATIENCE_S = 30.0


class Echo:
    """Repeats what it is sent, or does what a test has put in for a text; ends on "end"."""

    def __init__(self, deeds):
        self._deeds = deeds
        self.is_closed = False
        self.answer: str | None = None

    async def reset(self, prompt):
        self.answer = prompt.answer
        await self._do("reset")

    async def step(self, text):
        await self._do(text)
        return None if text == "end" else [{"role": "user", "content": text, "note": {"tuple": (1, 2)}}]

    async def reward(self):
        await self._do("reward")
        return RewardScore(value=1.0, parts={"kept": float(self.answer == "12")})

    async def close(self):
        self.is_closed = True
        await self._do("close")

    async def _do(self, name):
        outcome = self._deeds.get(name, lambda: None)()
        if asyncio.iscoroutine(outcome):
            await outcome


def forever():
    while True:
        pass


def sleeping():
    time.sleep(600)


def reading():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.recv(1)


def searching():
    re.search(r"(a+)+$", "a" * 60 + "b")


def stubborn():
    """Catches what it can, and keeps running."""
    num_caught = 0
    while True:
        try:
            forever()
        except Exception:  # noqa: BLE001
            num_caught += 1


def play(host, *texts):
    async def episode():
        await host.reset(1, PROMPT)
        for text in texts:
            await host.step(1, text)
        return await host.reward(1)

    return asyncio.run(asyncio.wait_for(episode(), PATIENCE_S))


def test_a_reward_that_is_no_finite_number_fails_its_episode():
    class Unsure(Echo):
        async def reward(self):
            return RewardScore(value=float("nan"), parts={})

    made = []

    def make():
        made.append(Unsure({}))
        return made[-1]

    with pytest.raises(EnvironmentFailedError, match="finite number, got nan") as caught:
        play(EpisodeHost(make, STEP_TIMEOUT_S), "end")
    assert caught.value.reason == "not_finite"
    assert made[0].is_closed


def failing(deeds, *texts):
    made = []

    def make():
        made.append(Echo(deeds))
        return made[-1]

    with pytest.raises(EnvironmentFailedError) as caught:
        play(EpisodeHost(make, STEP_TIMEOUT_S), *texts)
    return caught.value, made[0]


def test_an_episode_is_passed_through_as_plain_data():
    async def episode():
        host = EpisodeHost(lambda: Echo({}), STEP_TIMEOUT_S)
        await host.reset(1, PROMPT)
        assert await host.step(1, "hello") == [{"role": "user", "content": "hello", "note": {"tuple": [1, 2]}}]
        assert await host.step(1, "end") is None
        assert await host.reward(1) == RewardScore(value=1.0, parts={"kept": 1.0})
        await host.close(1)
        await host.close(1)

    asyncio.run(episode())


@pytest.mark.parametrize("where", ["reset", "hello", "reward"])
def test_what_raises_is_named_and_closed(where):
    def deed():
        raise ValueError("no bread")

    failure, environment = failing({where: deed}, "hello")
    assert (failure.reason, failure.detail) == ("raised", "ValueError: no bread")
    assert environment.is_closed


@pytest.mark.parametrize("where", ["reset", "hello", "reward"])
def test_what_waits_for_ever_is_ended(where):
    failure, environment = failing({where: lambda: asyncio.sleep(600)}, "hello")
    assert failure.reason == "timed_out"
    assert "environment.step_timeout_s = 0.3" in failure.detail
    assert environment.is_closed


@pytest.mark.parametrize("deed", [forever, sleeping, reading, searching, stubborn], ids=lambda deed: deed.__name__)
def test_what_never_lets_go_of_the_thread_is_ended(deed):
    failure, environment = failing({"hello": deed}, "hello")
    assert (failure.reason, failure.detail) == ("timed_out", "it blocked the thread for 0.3 s")
    assert environment.is_closed


def test_the_others_go_on_when_one_blocks():
    async def episodes():
        host = EpisodeHost(lambda: Echo({"bad": forever, "good": lambda: asyncio.sleep(0.01)}), STEP_TIMEOUT_S)

        async def one(number, text):
            await host.reset(number, PROMPT)
            for _ in range(3):
                await host.step(number, text)
            return await host.reward(number)

        work = [one(number, "bad" if number == 2 else "good") for number in range(5)]
        return await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), PATIENCE_S)

    outcomes = asyncio.run(episodes())
    assert [isinstance(outcome, RewardScore) for outcome in outcomes] == [True, True, False, True, True]
    assert outcomes[2].reason == "timed_out"


def test_a_close_that_raises_or_hangs_changes_nothing():
    def deed():
        raise ValueError("stuck door")

    async def episode():
        host = EpisodeHost(lambda: Echo({"close": deed}), STEP_TIMEOUT_S)
        await host.reset(1, PROMPT)
        score = await host.reward(1)
        await host.close(1)
        return score

    assert asyncio.run(episode()) == RewardScore(value=1.0, parts={"kept": 1.0})


def test_an_answer_of_another_form_is_a_failure():
    class Odd(Echo):
        async def step(self, text):
            return [{"content": text}]

    with pytest.raises(EnvironmentFailedError, match=r"\(raised\): TypeError: an answer must be chat messages"):
        play(EpisodeHost(lambda: Odd({}), STEP_TIMEOUT_S), "hello")


def test_an_episode_that_was_never_begun_is_lost():
    async def episode():
        await EpisodeHost(lambda: Echo({}), STEP_TIMEOUT_S).step(7, "hello")

    with pytest.raises(EnvironmentFailedError, match=r"\(lost\): there is no episode 7"):
        asyncio.run(episode())


def test_a_cancelled_call_is_cancelled():
    async def episode():
        host = EpisodeHost(lambda: Echo({"hello": lambda: asyncio.sleep(600)}), PATIENCE_S)
        await host.reset(1, PROMPT)
        call = asyncio.create_task(host.step(1, "hello"))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(asyncio.wait_for(episode(), PATIENCE_S))


def test_outside_the_main_thread_waiting_is_bounded_all_the_same():
    reasons = []

    def work():
        try:
            play(EpisodeHost(lambda: Echo({"hello": lambda: asyncio.sleep(600)}), STEP_TIMEOUT_S), "hello")
        except EnvironmentFailedError as error:
            reasons.append(error.reason)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert reasons == ["timed_out"]


def test_a_timer_that_was_there_before_is_put_back():
    struck = []
    handler = signal.signal(signal.SIGALRM, lambda number, frame: struck.append(number))
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        failing({"hello": forever}, "hello")
        assert 0 < signal.setitimer(signal.ITIMER_REAL, 0.01)[0] <= PATIENCE_S - STEP_TIMEOUT_S
        end_s = time.monotonic() + PATIENCE_S
        while not struck and time.monotonic() < end_s:
            time.sleep(0.01)
        assert struck == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)
