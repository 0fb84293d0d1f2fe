"""The opening of an agent's session, and its result."""

from dataclasses import dataclass, field
from typing import Any, Literal

from offbeat_core._contracts.requests import SamplingParams
from offbeat_core._contracts.trajectory import Trajectory

SessionEnd = Literal["call", "reward", "deadline", "taken"]


@dataclass(frozen=True, kw_only=True)
class SessionPlan:
    """Purpose and bounds of a session.

    Args:
        params: how its tokens are sampled, whatever the agent asks for: a trainer scores at one temperature. The agent
            may ask for fewer tokens and for further stop texts and stop tokens. Every sample draws with a seed made of
            this one's.
        deadline_s: after so many seconds the session ends.
        max_calls: samples of the session at most; more are refused.
        row: what the agent has to do, for one that asks for a session over HTTP.
        is_offered: give it to an agent that asks.
        may_post_reward: a client that has the second key of the session may end it with a reward.
    """

    params: SamplingParams
    deadline_s: float
    max_calls: int
    row: dict[str, Any] = field(default_factory=dict)
    is_offered: bool = False
    may_post_reward: bool = False


@dataclass(frozen=True, kw_only=True)
class RecordedSession:
    """Result of a session.

    Args:
        trajectories: in the order of their first calls; each sampled token is in the loss of one of them.
        answer: what the model said last, without control tokens.
        ended_by: `call`, `reward` (both by the agent), `deadline`, or `taken` (by the caller that opened it).
        reward: that the agent has posted.
        reward_parts: by name, as the agent has posted them.
        num_calls: samples asked for.
        num_aborted: of these, those that the engine ended before their time. Such an episode is not to be trained on.
    """

    trajectories: tuple[Trajectory, ...]
    answer: str
    ended_by: SessionEnd
    reward: float | None
    reward_parts: dict[str, float]
    num_calls: int
    num_aborted: int
