"""A user's reward functions, tried once before a run begins: whether what they return is a number at all."""

from offbeat_data._guard import GuardedReward
from offbeat_data._prompts import Prompt
from offbeat_data._reward import NotANumberError, RewardError
from offbeat_data._reward_config import RewardConfig
from offbeat_types import ConfigError, DataError

_MADE_UP = "a completion made up to try the reward: 42"


def try_reward(config: RewardConfig, prompt: Prompt, *, start_timeout_s: float = 60.0) -> str:
    """Score one made-up completion, where a function of the user's own takes part, in a process that is then ended.

    Args:
        config: the `reward` section.
        prompt: that it would be a completion of.
        start_timeout_s: longest wait for that process, which imports what the reward needs.

    Returns:
        What came of it, in words; empty where there is no such function.

    Raises:
        ConfigError: a function returns what is no number, or fails while `on_error` allows no failure.
        BackendError, DeadlineError: as `GuardedReward`.
    """
    if not any(":" in name for name in config.all_weights):
        return ""
    try:
        with GuardedReward(config, start_timeout_s=start_timeout_s) as guarded:
            score = guarded.score(prompt, _MADE_UP)
    except (RewardError, DataError) as error:
        if isinstance(error, NotANumberError) or config.on_error == "fail":
            raise ConfigError(f"reward: tried once on {_MADE_UP!r}, before anything starts: {error}") from error
        return f"could not score {_MADE_UP!r}: {error}; as reward.on_error = {config.on_error} it is no error yet"
    late = f", after more than reward.timeout_s = {config.timeout_s:g}" if score.parts["timed_out"] else ""
    return f"tried once on {_MADE_UP!r}: {score.value:g}{late}"
