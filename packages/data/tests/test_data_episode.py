"""One episode from prompt to trajectory: tokens are kept as sampled, limits hold, and every end has its name."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat_data import DataConfig, EpisodeLimits, Message, Tokenizer, TurnTemplate, play_episode
from offbeat_types import Completion, Ids, ModelError, StopReason, Trajectory, VersionSegment

PROMPT = np.array([50, 51, 52], np.int32)


class ScriptedModel:
    """Says fixed turns, token by token as given, and remembers what it was given to read."""

    def __init__(self, tokenizer: Tokenizer, turns: Sequence[tuple[list[int], StopReason]]) -> None:
        self._tokenizer, self._turns = tokenizer, list(turns)
        self.contexts: list[Ids] = []
        self.limits: list[int] = []

    async def sample(self, context_ids: Ids, max_tokens: int) -> Completion:
        ids, stop_reason = self._turns[len(self.contexts)]
        version = len(self.contexts)
        self.contexts.append(context_ids)
        self.limits.append(max_tokens)
        return Completion(
            ids=np.array(ids, np.int32),
            logprobs=-np.arange(len(ids), dtype=np.float32),
            segments=(
                VersionSegment(version=version, num_tokens=1),
                VersionSegment(version=version + 1, num_tokens=len(ids) - 1),
            ),
            stop_reason=stop_reason,
            text=self._tokenizer.decode(ids),
        )


class Answers:
    """An environment's `step`: fixed answers, and what it heard."""

    def __init__(self, *answers: str | None) -> None:
        self._answers, self.heard = list(answers), list[str]()

    async def step(self, text: str) -> list[Message] | None:
        self.heard.append(text)
        answer = self._answers[len(self.heard) - 1]
        return None if answer is None else [{"role": "tool", "content": answer}]


def play(model: ScriptedModel, answers: Answers, tokenizer: Tokenizer, **limits: int) -> Trajectory:
    allowed = EpisodeLimits(**{"max_turns": 9, "max_tokens": 999, "max_turn_tokens": 99, **limits})
    template = TurnTemplate(tokenizer, DataConfig(path=""))
    return asyncio.run(play_episode(PROMPT, model.sample, answers.step, template, allowed))


def one_by_one(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text as no tokenizer with merges would encode it: each character by itself, and the end token."""
    pieces = [tokenizer.encode([character], add_special_tokens=False)[0].tolist() for character in text]
    [end] = tokenizer.encode([tokenizer.special_tokens["eos_token"]], add_special_tokens=False)
    return [token for piece in pieces for token in piece] + end.tolist()


def test_sampled_tokens_are_never_encoded_anew(make_tokenizer: Callable[..., Tokenizer]) -> None:
    tokenizer = make_tokenizer("chatml")
    call, answer = one_by_one(tokenizer, "the answer is"), one_by_one(tokenizer, "that is the sum")
    whole = tokenizer.encode([tokenizer.decode(call)], add_special_tokens=False)[0].tolist()
    assert len(whole) < len(call) - 1  # the tokenizer would have chosen others

    model, answers = ScriptedModel(tokenizer, [(call, "eos"), (answer, "eos")]), Answers("12", None)
    trajectory = play(model, answers, tokenizer)

    assert answers.heard == ["the answer is", "that is the sum"]
    assert trajectory.ended == "done"
    reply = trajectory.replies[0].ids.tolist()
    assert (
        tokenizer.decode(reply, skip_special_tokens=False)
        == "\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n"
    )
    assert model.contexts[1].tolist() == PROMPT.tolist() + call + reply
    sequence = trajectory.to_sequence(PROMPT)
    assert sequence.ids.tolist() == PROMPT.tolist() + call + reply + answer
    learned = [False] * len(PROMPT) + [True] * len(call) + [False] * len(reply) + [True] * len(answer)
    assert sequence.loss_mask.tolist() == learned
    assert trajectory.logprobs.tolist() == [-float(at) for ids in (call, answer) for at in range(len(ids))]


def test_every_turn_keeps_the_versions_that_sampled_it(make_tokenizer: Callable[..., Tokenizer]) -> None:
    tokenizer = make_tokenizer("chatml")
    said = one_by_one(tokenizer, "is")
    trajectory = play(ScriptedModel(tokenizer, [(said, "eos")] * 2), Answers("12", None), tokenizer)
    assert [[(each.version, each.num_tokens) for each in turn.segments] for turn in trajectory.turns] == [
        [(0, 1), (1, len(said) - 1)],
        [(1, 1), (2, len(said) - 1)],
    ]
    assert (trajectory.oldest_version, trajectory.num_versions) == (0, 3)


@pytest.mark.parametrize(
    ("stop_reasons", "answers", "limits", "ended", "num_turns"),
    [
        (["eos", "stop"], ["a", None], {}, "done", 2),
        (["eos", "length"], ["a", "b"], {}, "cut_off", 2),
        (["aborted"], ["a"], {}, "cut_off", 1),
        (["length"], [None], {}, "cut_off", 1),
        (["eos", "eos"], ["a", "b"], {"max_turns": 2}, "max_turns", 2),
        (["eos", "eos"], ["a", None], {"max_turns": 2}, "done", 2),
        (["eos"], ["a" * 500], {"max_tokens": 60}, "max_tokens", 1),
    ],
)
def test_every_end_has_its_name_and_the_environment_hears_the_last_turn(
    stop_reasons: list[StopReason],
    answers: list[str | None],
    limits: dict[str, int],
    ended: str,
    num_turns: int,
    make_tokenizer: Callable[..., Tokenizer],
) -> None:
    tokenizer = make_tokenizer("chatml")
    said = one_by_one(tokenizer, "is")
    environment = Answers(*answers)
    model = ScriptedModel(tokenizer, [(said, reason) for reason in stop_reasons])
    trajectory = play(model, environment, tokenizer, **limits)
    assert (trajectory.ended, len(trajectory.turns)) == (ended, num_turns)
    assert len(environment.heard) == num_turns
    assert len(trajectory.ids) <= limits.get("max_tokens", 999)


def test_a_turn_gets_what_is_left_of_all_tokens(make_tokenizer: Callable[..., Tokenizer]) -> None:
    tokenizer = make_tokenizer("chatml")
    said = one_by_one(tokenizer, "is")
    model = ScriptedModel(tokenizer, [(said, "eos"), (said, "eos")])
    trajectory = play(model, Answers("12", None), tokenizer, max_tokens=80, max_turn_tokens=70)
    used = len(said) + len(trajectory.replies[0].ids)
    assert model.limits == [70, 80 - used]
    assert 80 - used < 70


def test_a_template_that_cannot_be_continued_ends_the_run_and_not_only_the_episode(
    make_tokenizer: Callable[..., Tokenizer],
) -> None:
    tokenizer = make_tokenizer("trims_start")
    model = ScriptedModel(tokenizer, [(one_by_one(tokenizer, "is"), "eos")])
    with pytest.raises(ModelError, match="changes the opening"):
        play(model, Answers("12"), tokenizer)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_tiny_models_of_the_tests_can_be_continued(family: Any, tmp_path: Path) -> None:
    from offbeat_data import load_tokenizer
    from offbeat_testing import tiny_model

    tokenizer = load_tokenizer(tiny_model(tmp_path, family))
    template = TurnTemplate(tokenizer, DataConfig(path=""))
    for role in ("tool", "user"):
        template.check([role])
    said = one_by_one(tokenizer, "one")
    text = tokenizer.decode(
        template.reply_ids(np.array(said), [{"role": "tool", "content": "two"}]), skip_special_tokens=False
    )
    assert text == "\n<|im_start|>tool\ntwo<|im_end|>\n<|im_start|>assistant\n"
