"""The alarm about completions that a limit cuts off before they are finished."""

from collections import deque
from collections.abc import Iterable
from typing import Final

from grpo_async_app._config.sections import GrpoConfig

CUT_OFF_ALARM_SHARE: Final = 0.25
"""Share of the completions. Up to here hard problems alone may ask for more tokens than there are; beyond it the limit
is what is learned from. It is raised once and changes nothing, so it needs no setting."""
_MARK: Final = "train/cut_off_share is above"
_WINDOW_UPDATES: Final = 8
"""Looked at together: long enough that one odd update is no alarm."""
_LEAST_SAMPLES: Final = 64
"""Samples from which on a share is known to about a tenth."""


class CutOffAlarm:
    """Says once that more completions than `CUT_OFF_ALARM_SHARE` are cut off.

    Args:
        config: of the run.
        alarms: texts of the alarms that earlier processes of this run raised; this one is not repeated.
    """

    def __init__(self, config: GrpoConfig, alarms: Iterable[str] = ()) -> None:
        self._config = config
        self._seen: deque[tuple[float, int]] = deque(maxlen=_WINDOW_UPDATES)
        self._is_raised = any(_MARK in text for text in alarms)

    def look(self, update: int, cut_off_share: float, num_samples: int) -> str:
        """Take what an update was trained on; return the alarm's text if it is the first one, else an empty text."""
        self._seen.append((cut_off_share * num_samples, num_samples))
        total = sum(count for _, count in self._seen)
        share = sum(cut for cut, _ in self._seen) / max(total, 1)
        if self._is_raised or total < _LEAST_SAMPLES or share <= CUT_OFF_ALARM_SHARE:
            return ""
        self._is_raised = True
        limit, advice = self._limit()
        return (
            f"{share:.0%} of the completions of updates {update - len(self._seen) + 1} to {update} were cut off at "
            f"{limit} ({_MARK} {CUT_OFF_ALARM_SHARE:.0%}): what is cut off is seldom rewarded. {advice}"
        )

    def _limit(self) -> tuple[str, str]:
        """Name the limit that cuts off, and the advice about it."""
        rollout, environment = self._config.rollout, self._config.environment
        shorter = "or ask for shorter answers, such as by data.system_prompt"
        if self._config.agent.is_set:
            return "the tokens that agents ask for", f"Let them ask for more, {shorter}."
        if environment.name:
            limits = "environment.max_tokens, environment.max_turns or rollout.max_tokens"
            return limits, f"Raise whichever it is, {shorter}."
        raised = "rollout.max_tokens, and rollout.max_model_len with it"
        return f"rollout.max_tokens = {rollout.max_tokens}", f"Raise {raised}, {shorter}."
