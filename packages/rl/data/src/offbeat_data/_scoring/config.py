"""The `reward` section."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from offbeat_core import ConfigError, as_written, setting

NEEDS_ANSWER = frozenset({"exact_match", "number_match", "math_verify"})
"""Rewards that compare with `Prompt.answer`."""


_MOST_PARTS: Final = 32
_PART_NAME: Final = re.compile(r"[\w/.-]{1,64}")


def parts_complaint(parts: Mapping[str, float]) -> str:
    """Say what is wrong with the parts of a reward that come from outside; empty when nothing is.

    Each becomes a metric of every update: names from a model or a page of the web must not become thousands.
    """
    if len(parts) > _MOST_PARTS:
        return f"a reward has {_MOST_PARTS} parts at most; got {len(parts)}"
    if wrong := [name for name in parts if not _PART_NAME.fullmatch(name)]:
        return f"names have 1 to 64 letters, digits and signs of _ / . -; got {wrong[0][:80]!r}"
    return ""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """One reward by `name`, or several by `weights`, and where in a completion they look for the answer."""

    name: str = setting(
        "",
        "exact_match, number_match, math_verify, reasoning_gym, judge, code, reward_model, or a Python function as "
        "module:function or file.py:function.",
        path="function",
    )
    weights: dict[str, float] = setting(
        {}, "Several rewards by name, each with its weight; the reward is their weighted sum.", path="function"
    )
    extract: str = setting(
        "all",
        "Where the answer is in a completion: all of it, the last <tag>, the last \\boxed{}, or the last match of "
        "pattern. Without an answer the reward is 0. Functions always get the whole completion.",
        choices=("all", "tag", "boxed", "pattern"),
    )
    tag: str = setting("answer", "Name of that tag.")
    pattern: str = setting("", "That regular expression; its first group is the answer.")
    reference_pattern: str = setting(
        "", "Regular expression that finds the answer in answer_column, such as #### (.*)."
    )
    ignore_case: bool = setting(False, "exact_match: take upper and lower case as equal.")
    tolerance: float = setting(1e-6, "number_match: relative difference that counts as equal.", ge=0, lt=1)
    function_options: dict[str, Any] = setting(
        {}, "Keyword arguments for functions, by their module:function name.", path="function"
    )
    signature: str = setting(
        "auto",
        "What functions were written for: offbeat's (prompt, completion), verl's compute_score, TRL's reward_func, "
        "OpenRLHF's reward_func; auto: recognised by the names of their parameters.",
        choices=("auto", "offbeat", "verl", "trl", "openrlhf"),
    )
    judge: dict[str, Any] = setting(
        {},
        "Of the reward judge: url, model, template, pattern and more; docs/rewards.md.",
        path={"cache_folder": "output"},
    )
    code: dict[str, Any] = setting(
        {},
        "Of the reward code: where tests are, limits, the sandbox; docs/rewards.md.",
        path={"packages": "input", "sandbox": "function"},
    )
    reward_model: dict[str, Any] = setting(
        {}, "Of the reward reward_model: path, device and more; docs/rewards.md.", path={"path": "model"}
    )
    timeout_s: float = setting(10.0, "Time to score one completion; after it the reward is 0 and counted.", "s", gt=0)
    num_processes: int = setting(
        8, "Processes that score side by side at most; one, and more only where completions wait.", "processes", ge=1
    )
    concurrency: int = setting(
        64,
        "Completions that wait side by side for a judge or a coroutine function, in one process.",
        "completions",
        ge=1,
    )
    forward_env: list[str] = setting(
        [],
        "Environment variables that functions get although they are named like secrets (key, token, secret, password).",
    )
    lowest: float = setting(
        -1e6, "A reward below it, or a part of it, cannot be right: it is treated as on_error says.", "reward"
    )
    highest: float = setting(1e6, "The same of one above it.", "reward")
    on_error: str = setting(
        "drop",
        "A completion that cannot be scored (a function raised, ended its process, or returned no finite number) is "
        "left out of its group, or scored 0, or ends the run. It is counted; the first tracebacks are kept.",
        choices=("drop", "zero", "fail"),
    )
    max_error_share: float = setting(
        0.1,
        "The run ends when more than this share of the last 200 completions could not be scored.",
        "share of 200 completions",
        ge=0,
        le=1,
    )

    @property
    def all_weights(self) -> Mapping[str, float]:
        """Weights of rewards by their labels in metrics and reports: functions as the user wrote them.

        Raises:
            ConfigError: none is named, both ways of naming are used, or two have one label.
        """
        if bool(self.name) == bool(self.weights):
            got = "both" if self.name else "neither"
            raise ConfigError(f'reward: give either name or weights, got {got}; such as name = "number_match"')
        if len(self.all_names) < len(self.weights):
            raise ConfigError(f"reward.weights: two functions are written alike: got {', '.join(self.weights)}")
        return {label: 1.0 if self.name else self.weights[name] for label, name in self.all_names.items()}

    @property
    def all_names(self) -> Mapping[str, str]:
        """Every reward as `find_function` takes it, by its label."""
        return {as_written(name): name for name in ([self.name] if self.name else self.weights)}

    @property
    def uses_reward_model(self) -> bool:
        """Return whether a model in a process of its own takes part."""
        return self.is_set and "reward_model" in self.all_weights

    @property
    def is_set(self) -> bool:
        """Return whether any reward is named."""
        return bool(self.name or self.weights)

    @property
    def needs_answer(self) -> bool:
        """Return whether prompts must have a reference answer."""
        return self.is_set and not NEEDS_ANSWER.isdisjoint(self.all_weights)

    def range_complaint(self, value: float, parts: Mapping[str, float]) -> str:
        """Say which of a reward and its parts is outside `lowest` and `highest`; empty when none is."""
        for name, number in {"it": value, **parts}.items():
            if not self.lowest <= number <= self.highest:
                what = "a reward" if name == "it" else f"the part {name} of a reward"
                return (
                    f"{what} must be in [{self.lowest:g}, {self.highest:g}] (reward.lowest, reward.highest): "
                    f"got {number:g}"
                )
        return ""

    def check(self) -> None:
        """Find what is wrong with these settings before anything starts.

        Raises:
            ConfigError: a broken regular expression, or a setting that would have no effect.
        """
        if self.lowest >= self.highest:
            raise ConfigError(f"reward.lowest = {self.lowest:g} must be below reward.highest = {self.highest:g}")
        names = self.all_weights
        for key, pattern in (("pattern", self.pattern), ("reference_pattern", self.reference_pattern)):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"reward.{key} is not a regular expression: {error}; got {pattern!r}") from error
        if (self.extract == "pattern") != bool(self.pattern):
            raise ConfigError('reward.pattern and extract = "pattern" need each other: give both or neither')
        if self.tag != "answer" and self.extract != "tag":
            raise ConfigError(f'reward.tag = {self.tag!r} has no effect without extract = "tag": leave one of them out')
        if self.signature != "auto" and not any(":" in name for name in names):
            raise ConfigError(
                f"reward.signature = {self.signature!r} has no effect: no reward of this run is a function of your own"
            )
        for own in ("judge", "code", "reward_model"):
            if getattr(self, own) and own not in names:
                raise ConfigError(f"the table reward.{own} has no effect: no reward of this run is named {own}")
        if unused := sorted(set(self.function_options) - set(self.all_names.values())):
            names_text = ", ".join(map(as_written, unused))
            raise ConfigError(f"reward.function_options names {names_text}, which is no reward of this run")
