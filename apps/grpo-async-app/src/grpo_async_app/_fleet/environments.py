"""The driver's side of the environments: calls with a deadline, and a new process for one that is gone or stuck."""

import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

from offbeat_actors import Launcher, RoleOnCall, RoleSpec
from offbeat_core import DeadlineError, OffbeatError, PeerFailedError
from offbeat_data import EnvironmentFailedError, Prompt, RewardScore

GRACE_S = 10.0
"""The role ends a step that takes too long. It gives others back the time that one has blocked it; so twice the time
of a step and this without an answer mean that the whole process is stuck."""

ABANDON_S = 1.0
"""Longest wait while notifying the process that an episode is over: nothing depends on it."""


class EnvironmentProcess:
    """A role `environment-N`. It is started again when it is called after its end.

    Args:
        step_timeout_s: for one answer of an environment.
    """

    def __init__(self, launcher: Launcher, spec: RoleSpec, step_timeout_s: float) -> None:
        self._role, self._deadline_s = RoleOnCall(launcher, spec), 2 * step_timeout_s + GRACE_S
        self._numbers = itertools.count()
        self.num_answers = 0  # of all episodes; it distinguishes slow from stuck

    async def start(self) -> None:
        """Start the process unless it runs."""
        await self._role.start()

    @contextlib.asynccontextmanager
    async def episode(self, prompt: Prompt) -> AsyncIterator["Episode"]:
        """An episode about a prompt, ended when the block is left; EnvironmentFailedError, as from its methods."""
        episode = Episode(self, next(self._numbers))
        try:
            await self.call("reset", episode.number, prompt)
            yield episode
        finally:
            if not episode.is_finished:
                await self._abandon(episode.number)

    async def call(self, method: str, *args: Any, returns: Any = None) -> Any:
        """Call the role, or say that the environment failed, took too long, or was lost with the process."""
        await self._role.start()  # what goes wrong here is no fault of an episode
        try:
            answer = await self._role.call(method, *args, returns=returns, deadline_s=self._deadline_s)
        except DeadlineError as error:
            # It blocks, and with it every episode of the process: this one, which sees it first, and others with it.
            raise EnvironmentFailedError("timed_out", str(error)) from error
        except PeerFailedError as error:
            raise EnvironmentFailedError("lost", f"{error.peer}: {error.reason}") from error
        self.num_answers += 1
        return answer

    async def _abandon(self, number: int) -> None:
        if self._role.handle is not None:
            with contextlib.suppress(OffbeatError):  # it is over in any case
                await self._role.handle.call("abandon", number, deadline_s=ABANDON_S)


class Episode:
    """One episode, as the driver sees it.

    Attributes:
        is_finished: nothing is left to be ended.
    """

    def __init__(self, process: EnvironmentProcess, number: int) -> None:
        self._process, self.number, self.is_finished = process, number, False

    async def step(self, text: str) -> list[dict[str, Any]] | None:
        answer: list[dict[str, Any]] | None = await self._process.call(
            "step", self.number, text, returns=list[dict[str, Any]] | None
        )
        return answer

    async def finish(self) -> RewardScore | None:
        score: RewardScore | None = await self._process.call("finish", self.number, returns=RewardScore | None)
        self.is_finished = True
        return score
