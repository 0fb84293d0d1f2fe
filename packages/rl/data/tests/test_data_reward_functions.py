"""Reward files as users of verl, TRL and OpenRLHF have them, called unchanged, by path or by module."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat_core import ConfigError
from offbeat_data import (
    CompletionText,
    DataConfig,
    FaultyFunctionError,
    Prompt,
    RewardConfig,
    RewardError,
    build_reward,
    load_prompts,
    parts_complaint,
)
from offbeat_data._character_tokenizer import build_character_tokenizer

ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "5 + 7?"}],
    "reward_model": {"style": "rule", "ground_truth": "12"},
    "extra_info": {"index": 3, "split": "train"},
    "solution": "12",
    "difficulty": 2,
}
PROMPT = Prompt(index=3, ids=np.array([1], np.int32), text="<user>5 + 7?<assistant>", answer="12", fields=ROW)
PLAIN = Prompt(
    index=3, ids=np.array([1], np.int32), text="5+7=", answer="12", fields={"prompt": "5+7=", "solution": "12"}
)

FILES = {
    # As in verl's examples of custom reward functions: keywords, a dictionary of what else is to be logged.
    "verl": """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert data_source == "openai/gsm8k" and extra_info["split"] == "train", (data_source, extra_info)
    assert extra_info["rollout_reward_scores"] == {} and "num_turns" in extra_info
    acc = solution_str.strip().endswith(ground_truth)
    return {"score": 1.0 if acc else -1.0, "acc": acc, "pred": solution_str, "penalty": kwargs.get("penalty", 0)}
""",
    # As in verl/utils/reward_score: of all that could be given, only what the task needs.
    "verl_short": """
def compute_score(solution_str, ground_truth, method="strict", format_score=0.25, score=1.0):
    if not solution_str:
        return 0
    return score if solution_str == ground_truth else format_score
""",
    # As trl.rewards: lists in and out, columns of the data set by name, None for what it does not judge.
    "trl": """
def accuracy_reward(completions: list[list[dict[str, str]]], solution: list[str], **kwargs) -> list[float | None]:
    contents = [completion[0]["content"] for completion in completions]
    assert kwargs["difficulty"] == [2] * len(completions) and len(kwargs["prompts"]) == len(completions)
    assert kwargs["prompts"][0][-1] == {"role": "user", "content": "5 + 7?"}
    return [None if not content else float(content == gold) for content, gold in zip(contents, solution, strict=True)]

def length_reward(completion_ids, **kwargs):
    return [-len(ids) / 10 for ids in completion_ids]

async def slow_reward(prompts, completions, log_metric=None, **kwargs):
    import asyncio
    await asyncio.sleep(0.01)
    log_metric("seen", len(completions))
    return [1.0 if "12" in str(each) else 0.0 for each in completions]

class Callable:
    __name__ = "object"
    def __call__(self, completions, **kwargs):
        return [0.5 for _ in completions]

an_object = Callable()
""",
    "trl_plain": """
def reward_len(prompts, completions, **kwargs):
    assert all(prompt == "5+7=" for prompt in prompts), prompts
    return [float(len(completion)) for completion in completions]
""",
    # As OpenRLHF calls it: whole texts, and a tensor in a dictionary.
    "openrlhf": """
import numpy
def reward_func(queries, prompts, labels, **kwargs):
    rewards = [float(query == prompt + label) for query, prompt, label in zip(queries, prompts, labels)]
    return {"rewards": numpy.array(rewards), "scores": rewards, "extra_logs": {}}
""",
    "group": '''
def longest(prompt, completions):
    """Compares: the longest of a group has 1."""
    return [float(len(each) == max(map(len, completions))) for each in completions]

async def rank(prompt, completions):
    return [sorted(completions).index(each) for each in completions]
''',
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def values(prompt: Prompt, texts: list[str], **settings: Any) -> list[float]:
    written = [CompletionText(text=text, ids=list(range(len(text)))) for text in texts]
    return [score.value for score in build_reward(RewardConfig(**settings)).score_group(prompt, written)]


def test_a_file_of_verl_is_called_as_verl_does(files: Path) -> None:
    name = f"{files}/verl.py:compute_score"
    reward = build_reward(RewardConfig(name=name, function_options={name: {"penalty": 2}}))
    right = reward.score(PROMPT, "It is 12")
    assert right.value == 1.0
    assert right.parts == {name: 1.0, f"{name}/acc": 1.0, f"{name}/penalty": 2.0}
    assert reward.score(PROMPT, "It is 13").value == -1.0
    assert reward.notes == (
        f"{name}: called as verl's compute_score(data_source, solution_str, ground_truth, extra_info), by the names of "
        "its parameters",
    )
    short = f"{files}/verl_short.py:compute_score"
    assert values(PROMPT, ["12", "13", ""], name=short) == [1.0, 0.25, 0.0]
    assert values(PROMPT, ["13"], name=short, function_options={short: {"format_score": 0.5}}) == [0.5]


def test_several_functions_of_trl_add_up_with_their_weights(files: Path) -> None:
    one, two, three = (f"{files}/trl.py:{name}" for name in ("accuracy_reward", "length_reward", "slow_reward"))
    weights = {one: 1.0, two: 0.5, three: 0.25, f"{files}/trl.py:an_object": 2.0}
    assert values(PROMPT, ["12", "13", ""], weights=weights) == pytest.approx(
        [1 - 0.5 * 0.2 + 0.25 + 1, 0 - 0.5 * 0.2 + 0 + 1, 0 + 1]
    )
    assert values(PLAIN, ["four", ""], name=f"{files}/trl_plain.py:reward_len") == [4.0, 0.0]


def test_prompts_of_trl_are_the_column_that_the_data_names(tmp_path: Path, files: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"asked": "5+7=", "answer": "12"}\n' * 2)
    data = DataConfig(path=str(tmp_path / "rows.jsonl"), prompt_column="asked", answer_column="answer")
    prompt = load_prompts(data, build_character_tokenizer(tmp_path)).train[0]
    assert (prompt.question, prompt.column) == ("5+7=", "asked")
    assert values(prompt, ["four"], name=f"{files}/trl_plain.py:reward_len") == [4.0]


def test_a_file_of_openrlhf_gets_whole_texts(files: Path) -> None:
    assert values(PROMPT, ["12", "13"], name=f"{files}/openrlhf.py:reward_func") == [1.0, 0.0]


def test_a_function_may_take_a_whole_group_and_may_wait(files: Path) -> None:
    longest, rank = f"{files}/group.py:longest", f"{files}/group.py:rank"
    reward = build_reward(RewardConfig(weights={longest: 1.0, rank: 0.5}))
    assert (reward.comparing, reward.waiting) == ((longest, rank), (rank,))
    written = [CompletionText(text=text) for text in ("b", "aaa", "c")]
    assert [score.value for score in reward.score_group(PROMPT, written)] == [0.5, 1.0, 1.0]
    scores = asyncio.run(reward.await_group(PROMPT, written, [rank], 5.0))
    assert [score.value for score in scores] == [0.5, 0.0, 1.0]


def test_functions_are_found_by_module_too_and_signatures_can_be_told(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    (files / "odd_reward.py").write_text(
        "def one(text, truth):\n    return 1.0\ndef two(solution_str, completions):\n    return 1.0\n"
        "def three(ground_truth, labels):\n    return 1.0\ndef four(*, state):\n    return 1.0\n"
        "def five(prompts, completions, **columns):\n    return 1.0\n"
    )
    assert values(PROMPT, ["13"], name="verl_short:compute_score") == [0.25]
    assert values(PROMPT, ["x"], name="odd_reward:one") == [1.0], "two parameters of any name: prompt and completion"
    for name, settings, message in (
        ("odd_reward:two", {}, "fit|do not show what it was written for .it could be verl and trl"),
        ("odd_reward:three", {}, "do not show what it was written for .it could be none"),
        ("odd_reward:four", {}, "cannot be called as function.prompt, completion"),
        ("odd_reward:one", {"signature": "verl"}, "cannot be called as verl's compute_score.*missing"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_reward(RewardConfig(name=name, **settings))
    with pytest.raises(RewardError, match=r"must return a list of 2 numbers, one for each completion: .* returned 1.0"):
        values(PROMPT, ["a", "b"], name="odd_reward:five")


def test_a_function_of_ours_gets_the_reference_answer_if_it_has_a_parameter_for_it(files: Path) -> None:
    (files / "answers.py").write_text(
        "def named(prompt, completion, answer=None, **more):\n    return float(completion == answer) - len(more)\n"
        "def group(prompt, completions, answer):\n    return [float(each == answer) for each in completions]\n"
        "def other(prompt, answer):\n    return float(answer == '12')\n"
        "def wrapped(*args, **named):\n    return float(args[1] == '12' and not named)\n"
    )
    for name in ("named", "group", "other", "wrapped"):
        assert values(PROMPT, ["12", "13"], name=f"{files}/answers.py:{name}") == [1.0, 0.0], name
    named = f"{files}/answers.py:named"
    assert values(PROMPT, ["12", "13"], name=named, function_options={named: {"answer": "13"}}) == [0.0, 1.0]


def test_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "beside.py").write_text("")
        (tmp_path / folder / "scores.py").write_text(
            f"import beside\nNAME = {folder!r}\ndef f(prompt, completion):\n    return float(NAME == completion)\n"
        )
    for folder in ("one", "two"):
        assert values(PROMPT, ["one", "two"], name=f"{tmp_path}/{folder}/scores.py:f") == [
            folder == "one",
            folder == "two",
        ]
    with pytest.raises(ConfigError, match="no such file"):
        build_reward(RewardConfig(name=f"{tmp_path}/three.py:f"))


FAULTY = """
import sys
def misspelt(prompt, completion):
    return lenght(completion)
def outdated(prompt, completion):
    return sys.bread
def mistyped(prompt, completion):
    return completion + 1
def attribute(prompt, completion):
    return completion.bread
"""


@pytest.mark.parametrize(
    ("name", "is_fault", "text"),
    [
        ("misspelt", True, "raised NameError on prompt 0: name 'lenght' is not defined ("),
        ("outdated", True, "module 'sys' has no attribute 'bread' ("),
        ("mistyped", False, "raised TypeError on prompt 0: can only concatenate str"),
        ("attribute", False, "'str' object has no attribute 'bread'"),
    ],
)
def test_what_a_function_would_raise_on_any_completion_is_told_from_what_it_raises_on_this_one(
    tmp_path: Path, name: str, is_fault: bool, text: str
) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    prompt = Prompt(index=0, ids=np.array([1], np.int32), text="1+1?")
    with pytest.raises(RewardError) as caught:
        build_reward(RewardConfig(name=f"{tmp_path}/faulty.py:{name}")).score(prompt, "2")
    assert isinstance(caught.value, FaultyFunctionError) == is_fault
    assert text in str(caught.value)
    assert ("faulty.py, line" in str(caught.value)) == is_fault


def test_a_reward_is_in_its_range_and_its_parts_from_outside_are_few() -> None:
    config = RewardConfig(name="exact_match", lowest=-1.0, highest=2.0)
    assert config.range_complaint(2.0, {"tests": -1.0}) == ""
    assert "a reward must be in [-1, 2]" in config.range_complaint(2.5, {})
    assert "the part tests of a reward" in config.range_complaint(0.0, {"tests": float("nan")})
    assert parts_complaint({f"a/b.c-{at}": 0.0 for at in range(32)}) == ""
    assert "got 33" in parts_complaint({str(at): 0.0 for at in range(33)})
    assert "got 'a b'" in parts_complaint({"a b": 0.0})
