"""What one sample became when an environment answers it: turns of sampled tokens, and what was read between them.

Legend: P prompt tokens, T tokens after the prompt, N of them sampled.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from offbeat_types._errors import ShapeError
from offbeat_types._requests import Ids, Image
from offbeat_types._rollout import Completion, Floats, StopReason, VersionSegment
from offbeat_types._training import TrainSequence

TrajectoryEnd = Literal["done", "cut_off", "max_turns", "max_tokens"]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the model was told between two of its turns: read by it, never learned.

    Args:
        ids: [R] int32, the environment's words and what the chat template puts around them.
        text: the environment's words, for people.
    """

    ids: Ids
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One sample from its prompt to its end; a plain completion is one turn.

    Its tokens are those that were sampled and those that were read, one after the other: nothing is decoded and
    encoded again, so that each log-probability belongs to the token and to the context it was sampled in.

    Args:
        turns: what the model said, exactly as the engine returned it; at least one.
        replies: what it was told after each turn but the last.
        ended: `done`: by the environment or, with one turn, by the model; `cut_off`: its last turn was too long;
            `max_turns`, `max_tokens`: it had no more turns or tokens left.
    """

    turns: tuple[Completion, ...]
    replies: tuple[Reply, ...] = ()
    ended: TrajectoryEnd = "done"

    def __post_init__(self) -> None:
        if len(self.turns) != len(self.replies) + 1:
            raise ShapeError(
                f"a trajectory needs at least one turn, and a reply between two: "
                f"got {len(self.turns)} turns and {len(self.replies)} replies"
            )

    @classmethod
    def of(cls, completion: Completion) -> "Trajectory":
        """The trajectory that is one completion."""
        return cls(turns=(completion,), ended="done" if completion.stop_reason in ("eos", "stop") else "cut_off")

    @property
    def ids(self) -> Ids:
        """[T] int32: sampled and read tokens after the prompt."""
        return np.concatenate(self._parts())

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """[T] bool: True where the token was sampled."""
        return self._mask(0)

    @property
    def logprobs(self) -> Floats:
        """[N] float32, nats, of the sampled tokens in order."""
        return np.concatenate([turn.logprobs for turn in self.turns])

    @property
    def segments(self) -> tuple[VersionSegment, ...]:
        """Which policy version sampled which run of the N sampled tokens; every turn begins a segment of its own."""
        return tuple(segment for turn in self.turns for segment in turn.segments)

    @property
    def num_tokens(self) -> int:
        """N."""
        return sum(len(turn.ids) for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token; lag is counted from it. 0 when there is no token."""
        return min((segment.version for segment in self.segments), default=0)

    @property
    def num_versions(self) -> int:
        """How many policy versions sampled it."""
        return len({segment.version for segment in self.segments})

    @property
    def stop_reason(self) -> StopReason:
        """Why its last turn ended."""
        return self.turns[-1].stop_reason

    @property
    def text(self) -> str:
        """The model's words, and between them what it was told, for people."""
        texts = [turn.text for turn in self.turns]
        return texts[0] + "".join(reply.text + text for reply, text in zip(self.replies, texts[1:], strict=True))

    def to_sequence(self, prompt_ids: Ids, images: tuple[Image, ...] = ()) -> TrainSequence:
        """The prompt and this trajectory, with the loss on what was sampled.

        Args:
            prompt_ids: [P] int32.
            images: of the prompt, in the order of their placeholders.
        """
        ids = np.concatenate([prompt_ids, *self._parts()])
        return TrainSequence(ids=ids, loss_mask=self._mask(len(prompt_ids)), images=images)

    def _parts(self) -> list[Ids]:
        """Tokens in order, sampled and read by turns."""
        parts = [self.turns[0].ids]
        for reply, turn in zip(self.replies, self.turns[1:], strict=True):
            parts += [reply.ids, turn.ids]
        return parts

    def _mask(self, num_prompt: int) -> npt.NDArray[np.bool_]:
        """[num_prompt + T] bool."""
        parts = self._parts()
        mask = np.ones(num_prompt + sum(map(len, parts)), np.bool_)
        mask[:num_prompt] = False
        start = num_prompt
        for at, part in enumerate(parts):
            if at % 2:
                mask[start : start + len(part)] = False
            start += len(part)
        return mask
