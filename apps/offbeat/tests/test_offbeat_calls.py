"""Functions of a program are called from another process, or here as from there, as if they were in a file."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from offbeat import _call_server
from offbeat._call_server import CallServer
from offbeat._calls import SOCKET_VARIABLE
from offbeat._rewards import read_reward
from offbeat_core import ConfigError
from offbeat_data import CompletionText, FaultyFunctionError, Prompt, RewardConfig, RewardError, build_reward

PROMPT = Prompt(
    index=3,
    ids=np.array([1, 2], np.int32),
    text="<user>5 + 7?<assistant>",
    answer="12",
    fields={"prompt": [{"role": "user", "content": "5 + 7?"}], "level": 2**70},
)


def ours(prompt: Any, completion: str, answer: str | None = None, **more: Any) -> dict[str, Any]:
    assert not more
    assert isinstance(prompt, Prompt)
    assert prompt.ids.tolist() == [1, 2]
    assert prompt.fields == PROMPT.fields
    return {"score": np.float32(completion == answer), "length": np.int64(len(completion)), "said": completion}


def group(prompt: Any, completions: list[str]) -> Any:
    return np.array([float(each == max(completions)) for each in completions])


def verl(data_source: Any, solution_str: str, ground_truth: str, extra_info: Any = None) -> bool:
    return solution_str == ground_truth and extra_info["num_turns"] is None


def trl(completions: list[Any], level: list[int], completion_ids: Any, log_metric: Any, **_: Any) -> list[float | None]:
    log_metric("ignored", 1.0)
    assert level == [2**70] * len(completions)
    assert completion_ids == [[7, 8]] * len(completions)
    return [None if each[0]["content"] == "?" else float(each[0]["content"] == "12") for each in completions]


def openrlhf(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    return {"rewards": [float(q == p + label) for q, p, label in zip(queries, prompts, labels, strict=True)]}


async def waits(prompt: Any, completion: str) -> float:
    await asyncio.sleep(0.01)
    return float(completion == "12")


class AnObject:
    def __call__(self, prompt: Any, completion: str) -> float:
        return float(completion == "12")


@contextmanager
def serving(reward: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardConfig]:
    section, functions = read_reward(reward)
    server = CallServer(functions)
    try:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield RewardConfig(**section)
    finally:
        server.close()


def values(config: RewardConfig, texts: list[str]) -> list[float]:
    written = [CompletionText(text=text, ids=[7, 8]) for text in texts]
    return [score.value for score in build_reward(config).score_group(PROMPT, written)]


@pytest.mark.parametrize("function", [ours, group, verl, trl, openrlhf, waits, AnObject(), lambda prompt, c: c == "12"])
def test_a_function_of_any_signature_is_called_as_it_would_be_from_a_file(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(function, monkeypatch) as config:
        assert values(config, ["12", "11"]) == [1.0, 0.0]
        reward = build_reward(config)
        assert bool(reward.comparing) == (function is group)
        assert bool(reward.waiting) == (function is waits)


def test_several_have_names_and_weights_and_what_they_return_beside_a_score_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide, narrow = (lambda prompt, completion, bound=bound: float(len(completion) > bound) for bound in (1, 3))
    with serving({ours: 1.0, wide: 10, narrow: 100, "exact_match": 1000}, monkeypatch) as config:
        names = ["offbeat.caller:ours", "offbeat.caller:lambda_", "offbeat.caller:lambda_2", "exact_match"]
        assert list(config.weights) == names
        [score] = build_reward(config).score_group(PROMPT, [CompletionText(text="12")])
        assert score.value == 1011.0
        assert score.parts["offbeat.caller:ours/length"] == 2.0
    assert read_reward({"name": ours, "timeout_s": 2.0})[0] == {"name": names[0], "timeout_s": 2.0}
    assert read_reward([ours, ours, "judge"])[0] == {"weights": {names[0]: 1.0, "judge": 1.0}}
    with pytest.raises(ConfigError, match="must be a name or a function"):
        read_reward([3])


def test_an_exception_comes_with_its_class_its_words_and_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(prompt: Any, completion: str) -> Any:
        if completion == "misspelt":
            return mathh.nan  # type: ignore[name-defined]  # noqa: F821
        if completion == "leaves":
            raise SystemExit(3)
        return {"key": math.nan, "set": {1}}[completion]

    said = r"the reward function offbeat.caller:fails raised {} on prompt 3: {}"
    with serving(fails, monkeypatch) as config:
        for text, kind, words in (
            ("absent", RewardError, said.format("KeyError", "'absent'")),
            ("leaves", RewardError, said.format("SystemExit", "3")),
            ("misspelt", FaultyFunctionError, said.format("NameError", r"name 'mathh' .*test_offbeat_calls.py, line")),
            ("set", FaultyFunctionError, said.format("TypeError", r"\{1\} \(set\) cannot be written as JSON")),
            ("key", RewardError, "must return a finite number: on prompt 3 it returned nan"),
        ):
            with pytest.raises(RewardError, match=words) as raised:
                values(config, [text])
            assert type(raised.value) is kind or text == "key"
            if text == "absent":
                assert raised.value.__cause__ is not None
                assert "in fails" in raised.value.__cause__.__notes__[0]


def test_a_program_that_is_gone_or_has_no_such_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(ours, monkeypatch) as config:
        reward = build_reward(config)
        with pytest.raises(ConfigError, match=r"offbeat.caller:other: the program gives ours as reward"):
            build_reward(RewardConfig(name="offbeat.caller:other"))
    with pytest.raises(RewardError, match="belongs to the program that has started the run"):
        reward.score(PROMPT, "12")
    with pytest.raises(ConfigError, match=r"by offbeat.resume\(RUN, reward=FUNCTION\)"):
        build_reward(config)
    monkeypatch.delenv(SOCKET_VARIABLE)
    with pytest.raises(ConfigError, match="belongs to the program that has started the run"):
        build_reward(config)


def test_a_coroutine_is_cancelled_when_the_time_of_its_completion_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    async def hangs(prompt: Any, completion: str) -> float:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()
        return 1.0

    with serving(hangs, monkeypatch) as config:
        reward = build_reward(config)
        with pytest.raises(TimeoutError):
            asyncio.run(reward.await_group(PROMPT, [CompletionText(text="12")], reward.names, 0.1))
        assert ended.wait(60)


def test_calls_come_at_once_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_call_server, "MAX_CALLS", 2)
    both = threading.Barrier(3)

    def slow(prompt: Any, completion: str) -> float:
        both.wait(60)
        both.wait(60)
        return 1.0

    with serving(slow, monkeypatch) as config:
        reward, found = build_reward(config), list[float]()
        calls = [threading.Thread(target=lambda: found.append(reward.score(PROMPT, "12").value)) for _ in range(2)]
        for call in calls:
            call.start()
        both.wait(60)
        with pytest.raises(RewardError, match="2 calls have not returned"):
            reward.score(PROMPT, "12")
        both.wait(60)
        for call in calls:
            call.join(60)
        assert found == [1.0, 1.0]
