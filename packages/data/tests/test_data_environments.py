"""Which environment a configuration names, what its settings need, and the tasks of reasoning-gym as one."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat_data import (
    DataConfig,
    Environment,
    EnvironmentConfig,
    Prompt,
    RewardScore,
    Tokenizer,
    ToolEnvironment,
    build_environment,
    load_prompts,
)
from offbeat_types import ConfigError

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
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_environment.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_environment", raising=False)
    return "own_environment"


def test_every_episode_gets_an_environment_of_its_own(own: str) -> None:
    make = build_environment(EnvironmentConfig(name=f"{own}:Own", options={"size": 3}))
    first, second = make(), make()
    assert first is not second
    assert first.size == 3  # type: ignore[attr-defined]
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
def test_what_cannot_be_built_is_refused_before_anything_starts(
    name: str, options: dict[str, Any], text: str, own: str
) -> None:
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
def test_settings_that_do_nothing_or_lack_something_are_refused(
    settings: dict[str, Any], has_reward: bool, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        EnvironmentConfig(**settings).check(has_reward=has_reward)


@pytest.mark.parametrize(
    ("name", "has_reward"), [("", True), ("calculator", True), ("verifiers", False), ("a:b", True), ("a:b", False)]
)
def test_settings_that_fit_pass(name: str, has_reward: bool) -> None:
    EnvironmentConfig(name=name).check(has_reward=has_reward)


def _problem(make_tokenizer: Callable[..., Tokenizer]) -> Prompt:
    config = DataConfig(path="reasoning-gym:chain_sum", num_items=1, max_prompt_tokens=9000)
    return load_prompts(config, make_tokenizer("chatml")).train[0]


async def _play(environment: Environment, prompt: Prompt, *texts: str) -> tuple[list[Any], RewardScore | None]:
    await environment.reset(prompt)
    answers = [await environment.step(text) for text in texts]
    score = await environment.reward()
    await environment.close()
    return answers, score


def test_a_task_of_reasoning_gym_may_be_tried_again(make_tokenizer: Callable[..., Tokenizer]) -> None:
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


def test_once_asked_it_scores_as_the_reward_of_that_name_does(make_tokenizer: Callable[..., Tokenizer]) -> None:
    from offbeat_data import RewardConfig, build_reward

    prompt = _problem(make_tokenizer)
    reward = build_reward(RewardConfig(name="reasoning_gym"))
    for text in (str(prompt.answer), "-1", "no idea"):
        environment = build_environment(EnvironmentConfig(name="reasoning_gym"))()
        assert asyncio.run(_play(environment, prompt, text)) == ([None], reward.score(prompt, text))


def test_tools_of_a_row_reach_the_template(
    make_tokenizer: Callable[..., Tokenizer], write_jsonl: Callable[..., str], tmp_path: Path
) -> None:
    import json
    import shutil

    from offbeat_data import load_tokenizer

    folder = shutil.copytree(Path(make_tokenizer("chatml").source), tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{{ tools | tojson }}{{ messages[0]['content'] }}")
    tools = [{"type": "function", "function": {"name": "add"}}]
    path = write_jsonl([{"prompt": "2+2", "answer": "4", "tools": tools}, {"prompt": "1+1", "answer": "2"}])
    with_tools, without = load_prompts(DataConfig(path=path), load_tokenizer(folder)).train
    assert with_tools.text == json.dumps(tools) + "2+2"
    assert without.text == "null1+1"


@pytest.mark.parametrize("there", [False, True], ids=["absent", "of a later kind"])
def test_verifiers_names_its_install_line(there: bool, tmp_path: Path) -> None:
    if there:  # from 0.4 on the package has no environments with turns
        (tmp_path / "verifiers.py").write_text("__version__ = '0.4.0'")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        + ("" if there else "sys.modules['verifiers'] = None\n")
        + "from offbeat_data import *\nfrom offbeat_types import BackendError\n"
        "for work in (lambda: build_environment(EnvironmentConfig(name='verifiers')),\n"
        "             lambda: load_prompts(DataConfig(path='verifiers:x'), None)):\n"
        "    try: work()\n    except BackendError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.count('pip install "verifiers>=0.3,<0.3.2"') == 2, done.stderr
