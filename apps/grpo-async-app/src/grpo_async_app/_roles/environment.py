"""The environment role: the environments of all episodes, in a process of their own.

What they import and compute stays out of the driver, which everything waits for; and one that cannot be ended any
other way is ended with this process.
"""

from typing import Any

from offbeat_core import drop_secrets
from offbeat_data import EnvironmentConfig, EpisodeHost, Prompt, RewardScore, build_environment


class EnvironmentRole:
    """Serves episodes by number. Every method raises EnvironmentFailedError when the episode's environment fails."""

    _host: EpisodeHost

    def __init__(self, *, config: EnvironmentConfig) -> None:
        drop_secrets([*config.forward_env, str(config.options.get("token_env", ""))])
        self._config = config

    async def start(self) -> None:
        """Import what the environment needs, in the main thread, where it may set signal handlers."""
        self._host = EpisodeHost(build_environment(self._config), self._config.step_timeout_s)

    async def reset(self, episode: int, prompt: Prompt) -> None:
        await self._host.reset(episode, prompt)

    async def step(self, episode: int, text: str) -> list[dict[str, Any]] | None:
        """Return what the environment says to a turn of the model; None when the episode is over."""
        return await self._host.step(episode, text)

    async def finish(self, episode: int) -> RewardScore | None:
        """End an episode, and return its reward; None leaves that to the `reward` section."""
        score = await self._host.reward(episode)
        await self._host.close(episode)
        return score

    async def abandon(self, episode: int) -> None:
        """End an episode that is no longer needed."""
        await self._host.close(episode)
