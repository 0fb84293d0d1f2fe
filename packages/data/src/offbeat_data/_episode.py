"""Plays one episode: the model speaks, the environment answers, until one of them or a limit ends it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from offbeat_data._chat_template import Message
from offbeat_data._environment import EnvironmentConfig
from offbeat_data._turn_template import TurnTemplate, extend
from offbeat_types import Completion, Ids, Reply, Trajectory, TrajectoryEnd

Sample = Callable[[Ids, int], Awaitable[Completion]]
"""Samples one turn: called with the context [P] int32 and the longest turn in tokens."""
Answer = Callable[[str], Awaitable[Sequence[Message] | None]]
"""`Environment.step`."""


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """How long an episode may be.

    Args:
        max_turns: of the model.
        max_tokens: after the prompt, said by the model and told to it.
        max_turn_tokens: of one turn.
    """

    max_turns: int
    max_tokens: int
    max_turn_tokens: int

    @classmethod
    def of(cls, config: EnvironmentConfig, max_turn_tokens: int) -> "EpisodeLimits":
        """The limits of a configuration."""
        return cls(max_turns=config.max_turns, max_tokens=config.max_tokens, max_turn_tokens=max_turn_tokens)


async def play_episode(
    prompt_ids: Ids, sample: Sample, answer: Answer, template: TurnTemplate, limits: EpisodeLimits
) -> Trajectory:
    """Play from the prompt to the end. What was sampled stays as it is, whatever text it makes.

    Args:
        prompt_ids: [P] int32.
        sample: samples one turn.
        answer: takes the text of a turn, of the last one too, and returns what the environment says to it.
        template: turns that into tokens.
        limits: of the episode.

    Raises:
        ModelError: the chat template cannot be continued; see `TurnTemplate.reply_ids`.
        OffbeatError: whatever `sample` and `answer` raise.
    """
    turns: list[Completion] = []
    replies: list[Reply] = []
    context_ids, tokens_left = prompt_ids, limits.max_tokens
    while True:
        completion = await sample(context_ids, min(limits.max_turn_tokens, tokens_left))
        turns.append(completion)
        messages = await answer(completion.text)
        ended = _why_over(completion, messages, len(turns), limits)
        if ended:
            return Trajectory(turns=tuple(turns), replies=tuple(replies), ended=ended)
        reply = template.reply(completion, messages or [])
        tokens_left -= len(completion.ids) + len(reply.ids)
        if tokens_left < 1:
            return Trajectory(turns=tuple(turns), replies=tuple(replies), ended="max_tokens")
        replies.append(reply)
        context_ids = extend(context_ids, completion.ids, reply.ids)


def _why_over(
    completion: Completion, messages: Sequence[Message] | None, num_turns: int, limits: EpisodeLimits
) -> TrajectoryEnd | None:
    """Why there is no further turn; None when there is one, if its reply leaves room."""
    if completion.stop_reason not in ("eos", "stop"):
        return "cut_off"  # an answer would follow words that it never ended
    if messages is None:
        return "done"
    return "max_turns" if num_turns >= limits.max_turns else None
