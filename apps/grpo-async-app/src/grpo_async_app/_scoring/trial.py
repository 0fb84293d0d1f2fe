"""One made-up completion, scored before a run starts: a function that cannot be called is found at once."""

import asyncio
from dataclasses import replace
from typing import Final

from grpo_async_app._scoring.pool import ScorerPool
from offbeat_actors import ClusterConfig
from offbeat_core import ConfigError, DataError, secret_variables
from offbeat_data import FaultyFunctionError, NotANumberError, Prompt, RewardConfig, RewardError, RewardScore
from offbeat_run import doing

_MADE_UP: Final = "a completion made up to try the reward: 42"


def try_reward(config: RewardConfig, prompt: Prompt, cluster: ClusterConfig) -> str:
    """Score one made-up completion, where a function of the user's own takes part, in a process that is then ended.

    A function may well raise on a text that answers nothing. What it would do on any other text too is refused.

    Returns:
        The outcome as a sentence; empty where there is no such function.

    Raises:
        ConfigError: a function returns no finite number, lacks a name, a module or a variable of the environment, or
            fails in another way while `on_error` allows no failure.
        BackendError, DeadlineError: as `ScorerPool.start`.
    """
    labels = [label for label in config.all_weights if ":" in label]
    if not labels:
        return ""
    doing("trying the reward", ", ".join(labels))
    own = {config.all_names[label]: config.all_weights[label] for label in labels}
    config = replace(config, name="", weights=own, judge={}, code={}, reward_model={})  # no other reward is asked
    try:
        score = asyncio.run(_score_once(ScorerPool(config, cluster), prompt))
    except (RewardError, DataError) as error:
        if missing := [name for name in secret_variables(config.forward_env) if name in str(error)]:
            raise ConfigError(
                f"reward: {error}; functions get no variable that is named like a secret unless reward.forward_env "
                f"names it: {missing}"
            ) from error
        if isinstance(error, FaultyFunctionError | NotANumberError) or config.on_error == "fail":
            raise ConfigError(
                f"reward: {error}; found by scoring a made-up completion before anything starts"
            ) from error
        return (
            f"tried once: a made-up completion, {_MADE_UP!r}, could not be scored: {error}; {_ALLOWED[config.on_error]}"
        )
    if score.parts["timed_out"]:
        return f"tried once: a made-up completion took more than reward.timeout_s = {config.timeout_s:g}"
    return f"tried once, and works: it gave a made-up completion {score.value:g}"


_ALLOWED: Final = {
    "drop": "such completions are left out (reward.on_error = drop)",
    "zero": "such completions get 0 (reward.on_error = zero)",
}


async def _score_once(pool: ScorerPool, prompt: Prompt) -> RewardScore:
    try:
        await pool.start()
        return await pool.judge(prompt, _MADE_UP)
    finally:
        await pool.close()
