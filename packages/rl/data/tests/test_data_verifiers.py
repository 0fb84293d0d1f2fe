"""The real verifiers, where it is installed: its loop, its tools, its rubrics and its clean-up, driven by `step`.

It brings some eighty packages, and needs an mcp that vLLM refuses, so it is in no extra:
`pip install "verifiers>=0.3,<0.3.2"`.
"""

import asyncio
import signal
import sys

import numpy as np
import pytest

from offbeat_core import ConfigError, DataError
from offbeat_data import EnvironmentConfig, EnvironmentFailedError, EpisodeHost, Prompt, build_environment
from offbeat_data._sources.task_libraries import draw_rows

pytest.importorskip("verifiers", reason="verifiers is not installed")

ENVIRONMENTS = '''
import time

import verifiers as vf
from datasets import Dataset

cleaned = []


def double(number: str) -> str:
    """Twice a number.

    Args:
        number: such as 4
    """
    return str(2 * int(number))


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        said = messages[-1].content
        if said == "block":
            time.sleep(600)
        if said == "fail":
            raise vf.ToolError("out of order")
        if said == state["answer"]:
            state["final_env_response"] = [vf.UserMessage(content="right")]
            return state["final_env_response"]
        return [vf.UserMessage(content="wrong")]

    @vf.cleanup
    async def note(self, state):
        cleaned.append(state["answer"])


class Forgetful(Guess):
    async def get_prompt_messages(self, state):
        return state["prompt"] if not state["trajectory"] else [vf.UserMessage(content="another story")]


async def right(completion, answer, **kwargs) -> float:
    return float(any(answer in (message.content or "") for message in completion if message.role == "assistant"))


async def best(completions, **kwargs) -> list[float]:
    return [0.0 for _ in completions]


def load_environment(kind="guess"):
    rows = Dataset.from_list([{"question": f"{n}+{n}", "answer": str(2 * n)} for n in range(3)])
    kinds = {"guess": Guess, "forgetful": Forgetful, "single": vf.SingleTurnEnv, "group": vf.SingleTurnEnv}
    rubric = vf.Rubric(funcs=[best if kind == "group" else right])
    if kind == "tools":
        return vf.ToolEnv(tools=[double], dataset=rows, rubric=rubric, max_turns=4, system_prompt="be brief")
    return kinds[kind](dataset=rows, eval_dataset=rows.select([1]), rubric=rubric)
'''


@pytest.fixture(autouse=True)
def _own_environments(tmp_path, monkeypatch):
    (tmp_path / "own_env.py").write_text(ENVIRONMENTS)
    monkeypatch.syspath_prepend(tmp_path)


def prompt(kind):
    row = draw_rows("own-env", split="train", options={"kind": kind})[2]
    return Prompt(index=2, ids=np.array([1], np.int32), text="2+2", answer=row["answer"], fields=row)


def play(kind, *texts, step_timeout_s=20.0):
    async def episode():
        host = EpisodeHost(build_environment(EnvironmentConfig(name="verifiers")), step_timeout_s)
        await host.reset(1, prompt(kind))
        answers = [await host.step(1, text) for text in texts]
        score = await host.reward(1)
        await host.close(1)
        return answers, score

    return asyncio.run(asyncio.wait_for(episode(), 60))


def test_rows_hold_prompts_answers_and_tools():
    [row, *_] = draw_rows("own-env", split="train", options={"kind": "tools"})
    assert row["prompt"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "0+0"}]
    assert row["answer"] == "0"
    assert row["tools"][0]["function"]["name"] == "double"
    asked = Prompt(index=0, ids=np.array([1], np.int32), text="0+0", answer="0", fields=row, answer_column="solution")
    assert asked.fields_to_answer.keys() == {"prompt", "tools"}, "the row of the environment holds the answer"
    [held_out] = draw_rows("own-env", split="eval", options={})
    assert held_out["answer"] == "2"


def test_one_turn_is_one_turn():
    answers, score = play("single", "it is 4")
    assert answers == [None]
    assert score is not None
    assert (score.value, score.parts["right"]) == (1.0, 1.0)


def test_turns_go_to_and_fro_until_the_environment_ends_them():
    answers, score = play("guess", "3", "4")
    assert answers == [[{"role": "user", "content": "wrong"}], None]
    assert score is not None
    assert (score.value, score.parts["num_turns"]) == (1.0, 2.0)


def test_tools_are_called_by_its_own_code():
    call = '<tool_call>{"name": "double", "arguments": {"number": "2"}}</tool_call>'
    answers, score = play("tools", f"Let me see. {call}", "It is 4.")
    assert [each["content"] for each in answers[0]] == ["4"]
    assert answers[1] is None
    assert score is not None
    assert (score.value, score.parts["double_calls"]) == (1.0, 1.0)


def test_an_episode_cut_short_is_cleaned_up_and_scored():
    prompt("guess")  # imports the module
    before = list(sys.modules["own_env"].cleaned)
    answers, score = play("guess", "3")
    assert answers == [[{"role": "user", "content": "wrong"}]]
    assert score is not None
    assert score.value == 0.0
    assert sys.modules["own_env"].cleaned == [*before, "4"]


@pytest.mark.parametrize(
    ("kind", "text", "reason", "detail"),
    [
        ("guess", "fail", "raised", "ToolError"),
        ("guess", "block", "timed_out", "blocked the thread"),
        ("forgetful", "3", "raised", "does not continue the messages before"),
    ],
)
def test_what_breaks_is_named(kind, text, reason, detail):
    with pytest.raises(EnvironmentFailedError, match=detail) as caught:
        play(kind, text, step_timeout_s=1.0)
    assert caught.value.reason == reason


def test_signals_stay_with_the_process():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    play("single", "4")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="scores groups"):
        draw_rows("own-env", split="train", options={"kind": "group"})
    with pytest.raises(ConfigError, match="has the splits train and eval"):
        draw_rows("own-env", split="test", options={})
    with pytest.raises(ConfigError, match="cannot load the environment 'nowhere-env'"):
        draw_rows("nowhere-env", split="train", options={})
    with pytest.raises(ConfigError, match="cannot load"):
        draw_rows("own-env", split="train", options={"colour": 3})
    strange = Prompt(index=0, ids=np.array([1], np.int32), text="?")

    async def reset():
        await build_environment(EnvironmentConfig(name="verifiers"))().reset(strange)

    with pytest.raises(DataError, match=r"set data\.path to verifiers:NAME"):
        asyncio.run(reset())
