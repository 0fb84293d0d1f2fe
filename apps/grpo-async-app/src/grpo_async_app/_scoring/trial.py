"""One made-up completion, scored before a run starts: a function that cannot be called is found at once."""

import asyncio
from dataclasses import replace
from typing import Final

from grpo_async_app._scoring.pool import ScorerPool
from offbeat_actors import ClusterConfig
from offbeat_data import NotANumberError, Prompt, RewardConfig, RewardError, RewardScore
from offbeat_types import ConfigError, DataError

_MADE_UP: Final = "a completion made up to try the reward: 42"


def try_reward(config: RewardConfig, prompt: Prompt, cluster: ClusterConfig) -> str:
    """Score one made-up completion, where a function of the user's own takes part, in a process that is then ended.

    Returns:
        What came of it, in words; empty where there is no such function.

    Raises:
        ConfigError: a function returns what is no number, or fails while `on_error` allows no failure.
        BackendError, DeadlineError: as `ScorerPool.start`.
    """
    own = {name: weight for name, weight in config.all_weights.items() if ":" in name}
    if not own:
        return ""
    config = replace(config, name="", weights=own, judge={}, code={}, reward_model={})  # nobody else is bothered
    try:
        score = asyncio.run(_score_once(ScorerPool(config, cluster), prompt))
    except (RewardError, DataError) as error:
        if isinstance(error, NotANumberError) or config.on_error == "fail":
            raise ConfigError(f"reward: tried once on {_MADE_UP!r}, before anything starts: {error}") from error
        return f"could not score {_MADE_UP!r}: {error}; as reward.on_error = {config.on_error} it is no error yet"
    late = f", after more than reward.timeout_s = {config.timeout_s:g}" if score.parts["timed_out"] else ""
    return f"tried once on {_MADE_UP!r}: {score.value:g}{late}"


async def _score_once(pool: ScorerPool, prompt: Prompt) -> RewardScore:
    try:
        await pool.start()
        return await pool.judge(prompt, _MADE_UP)
    finally:
        await pool.close()
