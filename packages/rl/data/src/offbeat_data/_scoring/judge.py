"""A language model as judge, over any endpoint that speaks OpenAI's chat completions: `offbeat-serve` too."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from offbeat_core import ConfigError, read_options, setting
from offbeat_data._datasets.prompts import Prompt
from offbeat_data._scoring.answers import to_number
from offbeat_data._scoring.functions import CompletionText, RewardError, RewardValue
from offbeat_data._scoring.judge_client import JudgeClient, JudgeReply

_TEMPLATE: Final = """Judge an answer to a question.

Question:
{question}

Reference answer:
{answer}

Answer to judge:
{completion}

Think briefly, then end with one line: Score: N, where N is a whole number from 0 (wrong or useless) to 10 (right)."""


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """The table `reward.judge`."""

    url: str = setting("", "Of the endpoint, up to /v1: https, or http on this machine (loopback).")
    model: str = setting("", "Name of the model there.")
    key_env: str = setting("", "Name of the environment variable that holds the key; empty: none is sent.")
    system: str = setting("", "Text of a system message.")
    template: str = setting(
        _TEMPLATE, "The user's message; {question}, {answer}, {completion}, {prompt} are filled in."
    )
    pattern: str = setting(
        r"(?i)score:\s*(?:\*+\s*)?(-?\d+(?:\.\d+)?(?:/\d+)?)",
        "Regular expression; the first group of its last match in the reply is the score.",
    )
    scores: dict[str, float] = setting({}, "Scores of words, where the reply's score is no number, such as {yes = 1}.")
    divide_by: float = setting(10.0, "The number that was found is divided by this.", gt=0)
    lowest: float = setting(0.0, "Of the result; what is below becomes this.")
    highest: float = setting(1.0, "Of the result; what is above becomes this.")
    max_tokens: int = setting(512, "Of a reply.", "tokens", ge=1)
    temperature: float = setting(0.0, "Of the judge.", ge=0)
    options: dict[str, Any] = setting({}, "Other fields of each request, such as {top_p = 0.9}.")
    request_timeout_s: float = setting(60.0, "For one reply, at most reward.timeout_s.", "s", gt=0)
    max_retries: int = setting(4, "When the endpoint is busy, broken or away (408, 409, 429, 5xx).", "retries", ge=0)
    backoff_s: float = setting(0.5, "Before the first retry; twice as long before each next.", "s", gt=0)
    requests_per_minute: float = setting(
        0.0, "At most; 0: no limit. A wait for it counts in no deadline.", "requests/min", ge=0
    )
    cache_folder: str = setting("", "Keeps replies, by the content of the request; empty: none are kept.")


class Judge:
    """Asks a judge about each completion.

    Args:
        options: the table `reward.judge`.
        timeout_s: for one completion, retries included.

    Raises:
        ConfigError: an option that cannot be, a key that is not in the environment.
        BackendError: httpx is not installed.
    """

    def __init__(self, options: dict[str, Any], timeout_s: float) -> None:
        self._options = read_options("reward.judge", JudgeOptions, options)
        self._check()
        self._pattern = re.compile(self._options.pattern)
        self._client = JudgeClient(
            self._options.url,
            key_env=self._options.key_env,
            request_timeout_s=min(self._options.request_timeout_s, timeout_s),
            max_retries=self._options.max_retries,
            backoff_s=self._options.backoff_s,
            requests_per_minute=self._options.requests_per_minute,
            cache_folder=self._options.cache_folder,
        )

    async def score(self, prompt: Prompt, written: Sequence[CompletionText]) -> list[RewardValue]:
        """Ask about completions of one prompt, side by side.

        Raises:
            RewardError: the endpoint refused, or did not answer after all retries, or its reply holds no score.
        """
        replies = await asyncio.gather(*(self._client.ask(self._request(prompt, each.text)) for each in written))
        return [self._worth(reply, prompt) for reply in replies]

    def _request(self, prompt: Prompt, completion: str) -> dict[str, Any]:
        options = self._options
        filled = {
            "question": _as_text(prompt.question),
            "answer": prompt.answer or "",
            "completion": completion,
            "prompt": prompt.text,
        }
        # One pass: braces in what is filled in stay as they are.
        content = re.sub(r"\{(question|answer|completion|prompt)\}", lambda found: filled[found[1]], options.template)
        system = [{"role": "system", "content": options.system}] if options.system else []
        return {
            "model": options.model,
            "messages": [*system, {"role": "user", "content": content}],
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            **options.options,
        }

    def _worth(self, reply: JudgeReply, prompt: Prompt) -> RewardValue:
        """Return the score of a verdict: a number is divided and kept within the bounds, a word has its own."""
        found = list(self._pattern.finditer(reply.text))
        text = (found[-1].group(1) or "").strip() if found else ""
        value = self._value(text)
        if value is None:
            raise RewardError(
                f"the judge's reply on prompt {prompt.index} holds no score (reward.judge.pattern = "
                f"{self._options.pattern!r}): {reply.text[-200:]!r}"
            )
        return RewardValue(value=value, costs=reply.costs)

    def _value(self, text: str) -> float | None:
        options = self._options
        words = {word.casefold(): score for word, score in options.scores.items()}
        if text.casefold() in words:
            return float(words[text.casefold()])
        number = to_number(text)
        if number is None:
            return None
        return min(max(float(number) / options.divide_by, options.lowest), options.highest)

    def _check(self) -> None:
        options = self._options
        for name in ("url", "model"):
            if not getattr(options, name):
                raise ConfigError(f"the reward judge needs reward.judge.{name}")
        try:
            num_groups = re.compile(options.pattern).groups
        except re.error as error:
            raise ConfigError(f"reward.judge.pattern is not a regular expression: {error}") from error
        if num_groups < 1:
            raise ConfigError(f"reward.judge.pattern needs a group that is the score, got {options.pattern!r}")
        if decided := [name for name in ("model", "messages", "max_tokens", "temperature") if name in options.options]:
            raise ConfigError(
                f"reward.judge.options must not hold {', '.join(decided)}: keys of reward.judge decide it (messages: "
                "system and template)"
            )
        if "{completion}" not in options.template:
            raise ConfigError("reward.judge.template must contain {completion}: the judge would not see what it judges")
        if options.lowest >= options.highest:
            raise ConfigError("reward.judge.lowest must be below reward.judge.highest")
        if not all(isinstance(score, int | float) for score in options.scores.values()):
            raise ConfigError("reward.judge.scores must be numbers by word, such as {yes = 1, no = 0}")


def _as_text(question: str | list[dict[str, Any]]) -> str:
    """Return what was asked, as text: of chat messages, those that the model was to answer."""
    if isinstance(question, str):
        return question
    said = [(str(each.get("role", "")), _content(each.get("content"))) for each in question]
    return said[0][1] if len(said) == 1 else "\n\n".join(f"{role}: {content}" for role, content in said)


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")
