"""The driver's side of agents: a session on an engine, a program that has its key, and what the session recorded."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.engines import Engines
from grpo_async_app._roles.agent import AgentExit
from offbeat_actors import Launcher, RoleOnCall, RoleSpec
from offbeat_async_policy import Busy
from offbeat_core import (
    DeadlineError,
    GenerateRequest,
    OffbeatError,
    PeerFailedError,
    RecordedSession,
    SamplingParams,
    SessionPlan,
)
from offbeat_data import Prompt

GRACE_S: Final = 30.0
"""The role ends a program at its deadline; so long after it without an answer mean that the role itself is stuck."""
LINGER_S: Final = 5.0
"""A program that has ended its session may do so much more before it is killed."""
ABANDON_S: Final = 1.0
"""Longest wait while notifying an engine that a session is not needed: nothing depends on it."""


class AgentFailedError(OffbeatError):
    """An episode of an agent that came to no end: it has no reward and is not trained on.

    Args:
        reason: to be counted: `failed` (its program), `timed_out`, `lost` with the process that ran it, or `silent`: it
            has got no answer of the policy.
        detail: what went wrong.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"an agent's episode failed ({self.reason}): {self.detail}"


class AgentProcess:
    """The role `agent-0`, which runs the programs. It is started again when it is called after its end.

    Attributes:
        num_ended: programs that have; it distinguishes slow from stuck.
    """

    def __init__(self, launcher: Launcher, spec: RoleSpec, deadline_s: float) -> None:
        self._role, self._deadline_s = RoleOnCall(launcher, spec), deadline_s + GRACE_S
        self.num_ended = 0

    async def start(self) -> None:
        """Start the process unless it runs."""
        await self._role.start()

    async def run(self, row: Mapping[str, Any], base_url: str, key: str, reward_key: str) -> AgentExit:
        """Run the program once; it is killed when this is cancelled.

        Raises:
            AgentFailedError: it was lost with the process.
        """
        await self._role.start()  # what goes wrong here is no fault of an episode
        try:
            ended: AgentExit = await self._role.call(
                "run", dict(row), base_url, key, reward_key, returns=AgentExit, deadline_s=self._deadline_s
            )
        except DeadlineError as error:
            raise AgentFailedError("lost", str(error)) from error
        except PeerFailedError as error:
            raise AgentFailedError("lost", f"{error.peer}: {error.reason}") from error
        self.num_ended += 1
        return ended


class Agents:
    """Plays episodes of agents.

    Args:
        process: runs the programs; None: agents run elsewhere and ask for sessions.
        busy: wraps each use of the rollout engine it is called with.
    """

    def __init__(self, config: GrpoConfig, engines: Engines, process: AgentProcess | None, busy: Busy) -> None:
        self._config, self._engines, self._process, self._busy = config, engines, process, busy
        self._places = asyncio.Semaphore(config.agent.max_running)
        self._deadline_s = config.async_.group_deadline_s

    async def play(self, name: str, prompt: Prompt, request: GenerateRequest, index: int) -> RecordedSession:
        """Play one episode about a prompt, with the policy on one engine.

        Args:
            name: of the engine.
            prompt: whose row the agent gets.
            request: how samples of the group are drawn.
            index: of this sample in its group.

        Returns:
            What was recorded, of an episode that has come to its end.

        Raises:
            AgentFailedError: it has not.
            PeerFailedError: the engine is gone.
        """
        row = prompt.fields if self._config.agent.shows_answer else prompt.fields_to_answer
        async with self._places:
            plan = SessionPlan(
                params=_params(request.params, index),
                deadline_s=self._config.agent.deadline_s,
                max_calls=self._config.agent.max_calls,
                row=row,
                is_offered=self._process is None,
                may_post_reward=self._config.agents_post_rewards,
            )
            with self._busy(name):
                return await self._play(name, row, plan)

    async def _play(self, name: str, row: Mapping[str, Any], plan: SessionPlan) -> RecordedSession:
        address: tuple[str, str, str] = await self._engines.call(
            name, "open_session", plan, returns=tuple[str, str, str], deadline_s=self._deadline_s
        )
        base_url, key, reward_key = address
        taken = False
        try:
            ended = await self._end_of(name, row, base_url, key, reward_key)
            recorded: RecordedSession | None = await self._engines.call(
                name, "take_session", key, returns=RecordedSession | None, deadline_s=self._deadline_s
            )
            taken = True
        finally:
            if not taken:
                with contextlib.suppress(OffbeatError):  # it is over in any case
                    await self._engines.call(name, "drop_session", key, deadline_s=ABANDON_S)
        if recorded is None:
            raise PeerFailedError(name, "it was started again, and the sessions of its former process are lost")
        return _checked(recorded, ended, self._config)

    async def _end_of(
        self, name: str, row: Mapping[str, Any], base_url: str, key: str, reward_key: str
    ) -> AgentExit | None:
        """Wait until the session or the program has ended: how the program did, where it did."""
        deadline_s = self._config.agent.deadline_s + self._deadline_s
        over = asyncio.ensure_future(self._engines.call(name, "wait_session", key, deadline_s=deadline_s))
        if self._process is None:
            async with _cancelled_after(over):
                await over
            return None
        program = asyncio.ensure_future(self._process.run(row, base_url, key, reward_key))
        async with _cancelled_after(over, program):
            await asyncio.wait({over, program}, return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                over.result()  # raises what has happened to the engine
                await asyncio.wait({program}, timeout=LINGER_S)
            return program.result() if program.done() else None


@asynccontextmanager
async def _cancelled_after(*tasks: "asyncio.Future[Any]") -> AsyncIterator[None]:
    """Cancel what is still running when the block ends."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _checked(recorded: RecordedSession, ended: AgentExit | None, config: GrpoConfig) -> RecordedSession:
    """Return what was recorded, with the answer that is to be scored."""
    if recorded.ended_by == "deadline" or (ended is not None and ended.how == "timed_out"):
        raise AgentFailedError("timed_out", f"no end within agent.deadline_s = {config.agent.deadline_s:g} s")
    if recorded.ended_by == "taken" and ended is not None and ended.how == "failed":
        raise AgentFailedError("failed", ended.detail)
    if not recorded.trajectories and not recorded.num_aborted:
        raise AgentFailedError("silent", "it has got no answer of the policy")
    if config.agent.answer == "stdout" and ended is not None:
        return replace(recorded, answer=ended.printed.strip())
    return recorded


def _params(params: SamplingParams, index: int) -> SamplingParams:
    """Return those of one sample of a group."""
    return params if params.seed is None else replace(params, seed=params.seed + index)
