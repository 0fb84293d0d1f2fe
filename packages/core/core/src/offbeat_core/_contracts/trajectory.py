"""Samples and what was read after a prompt, and the sequence to learn from that is made of it.

Legend: P prompt tokens, T tokens of a completion or after the prompt, N of them sampled.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from offbeat_core._contracts.requests import Floats, Ids, Image, check_images
from offbeat_core._contracts.routes import Routes
from offbeat_core._errors import ShapeError

StopReason = Literal["eos", "stop", "length", "aborted"]


@dataclass(frozen=True, kw_only=True)
class VersionSegment:
    """A run of `num_tokens` tokens, all sampled by policy `version`."""

    version: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Completion of one sample.

    Args:
        ids: [T] int32, the end-of-sequence or stop token included when one was sampled.
        logprobs: [T] float32, nats, of each sampled token (see `SamplingParams`).
        segments: which policy version sampled which run of tokens, oldest first; they add up to T.
        stop_reason: `aborted` means unfinished: continue it or drop it, never train on it as if it had ended.
        text: decoded ids without special tokens.
        routes: experts that tokens of the prompt and the completion took when they were first computed, by the version
            that sampled the token after them; None where the engine does not say.
    """

    ids: Ids
    logprobs: Floats
    segments: tuple[VersionSegment, ...]
    stop_reason: StopReason
    text: str = ""
    routes: Routes | None = None

    def __post_init__(self) -> None:
        covered = sum(segment.num_tokens for segment in self.segments)
        if not len(self.ids) == len(self.logprobs) == covered:
            raise ShapeError(
                f"a completion needs as many ids, logprobs and version-segment tokens: "
                f"got {len(self.ids)}, {len(self.logprobs)} and {covered}"
            )

    @classmethod
    def join(
        cls,
        ids: Sequence[int],
        logprobs: Sequence[float],
        runs: Iterable[tuple[int, int]],
        stop_reason: StopReason | None,
        text: str,
        routes: Routes | None = None,
    ) -> Self:
        """Make one of lists.

        Args:
            ids: token ids.
            logprobs: of each.
            runs: (version, number of tokens), oldest first; neighbours of one version become one segment.
            stop_reason: None: the sample has not ended, and is marked aborted.
            text: decoded ids.
            routes: of prompt and completion.
        """
        segments: list[VersionSegment] = []
        for version, num_tokens in runs:
            if segments and segments[-1].version == version:
                num_tokens += segments.pop().num_tokens
            segments.append(VersionSegment(version=version, num_tokens=num_tokens))
        return cls(
            ids=np.asarray(ids, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            segments=tuple(segments),
            stop_reason=stop_reason or "aborted",
            text=text,
            routes=routes,
        )

    def with_routes_since(self, start: int) -> Self:
        """Return it with the routes of tokens from `start` on, an index in prompt and completion, alone."""
        return self if self.routes is None else replace(self, routes=self.routes.since(start))

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token; lag is counted from it. 0 when there is no token."""
        return min((segment.version for segment in self.segments), default=0)


@dataclass(frozen=True, kw_only=True)
class TrainSequence:
    """One token sequence to learn from. Index t of every array belongs to token t, predicted from tokens before t.

    Args:
        ids: [T] int32.
        loss_mask: [T] bool; True where the token enters the loss. loss_mask[0] must be False.
        extras: per-token inputs of the loss, each [T] float32; entries where loss_mask is False are not read.
        images: each [H, W, 3] uint8, in the order of their placeholders, as in `GenerateRequest`. A placeholder in the
            loss was sampled: it is a token like any other, and stands for no image.
        group: sequences of one group, such as the two of a preference pair, are computed in one micro-batch, so that
            a loss can compare them; -1 for a sequence of its own.
        routes: experts that tokens took in the engine that sampled; a token takes the route of the first that knows
            it, and without one the policy's router chooses.

    Raises:
        ShapeError: the arrays differ in shape, or loss_mask[0] is True.
        DataError: an image that is not one.
    """

    ids: Ids
    loss_mask: npt.NDArray[np.bool_]
    extras: dict[str, Floats] = field(default_factory=dict)
    images: tuple[Image, ...] = ()
    group: int = -1
    routes: tuple[Routes, ...] = ()

    def __post_init__(self) -> None:
        check_images(self.images, "a sequence to learn from")
        if any(each.stop > len(self.ids) for each in self.routes):
            raise ShapeError(f"a sequence of {len(self.ids)} tokens has routes of {self.routes[-1].stop}")
        shapes = {"loss_mask": self.loss_mask.shape, **{name: array.shape for name, array in self.extras.items()}}
        wrong = {name: shape for name, shape in shapes.items() if shape != self.ids.shape}
        if wrong:
            raise ShapeError(f"every array of a sequence needs the shape of ids {self.ids.shape}: got {wrong}")
        if len(self.ids) and self.loss_mask[0]:
            raise ShapeError("loss_mask[0] must be False: nothing comes before the first token to predict it from")


TrajectoryEnd = Literal["done", "cut_off", "max_turns", "max_tokens"]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Reply to the model between two of its turns: read by it, never learned.

    Args:
        ids: [R] int32, the environment's words and what the chat template puts around them; an image stands in them as
            all its placeholder tokens.
        text: the environment's words, for people.
        images: each [H, W, 3] uint8, in the order of their placeholders.
    """

    ids: Ids
    text: str = ""
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One sample from its prompt to its end; a plain completion is one turn.

    Its tokens are those that were sampled and those that were read, one after the other: nothing is decoded and
    encoded again, so that each log-probability belongs to the token and to the context it was sampled in.

    Args:
        turns: what the model said, exactly as the engine returned it; at least one.
        replies: what it was given to read after each turn but the last.
        ended: `done`: by the environment or, with one turn, by the model; `cut_off`: its last turn was too long;
            `max_turns`, `max_tokens`: it had no more turns or tokens left.
        prompt_ids: [P] int32, what was read before the first turn where that is not the prompt of its group: an agent
            writes its prompts itself, and what it has branched off from was sampled in another trajectory.
    """

    turns: tuple[Completion, ...]
    replies: tuple[Reply, ...] = ()
    ended: TrajectoryEnd = "done"
    prompt_ids: Ids | None = None

    def __post_init__(self) -> None:
        if len(self.turns) != len(self.replies) + 1:
            raise ShapeError(
                f"a trajectory needs at least one turn, and a reply between two: "
                f"got {len(self.turns)} turns and {len(self.replies)} replies"
            )

    @classmethod
    def of(cls, completion: Completion) -> "Trajectory":
        """Return the trajectory that is one completion."""
        return cls(turns=(completion,), ended="done" if completion.stop_reason in ("eos", "stop") else "cut_off")

    @property
    def ids(self) -> Ids:
        """[T] int32: sampled and read tokens after the prompt."""
        return np.concatenate([ids for ids, _ in self._parts()])

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """[T] bool: True where the token was sampled."""
        return np.concatenate([np.full(len(ids), was_sampled) for ids, was_sampled in self._parts()])

    @property
    def logprobs(self) -> Floats:
        """[N] float32, nats, of the sampled tokens in order."""
        return np.concatenate([turn.logprobs for turn in self.turns])

    @property
    def segments(self) -> tuple[VersionSegment, ...]:
        """Return which policy version sampled which run of the N sampled tokens.

        Every turn begins a segment of its own.
        """
        return tuple(segment for turn in self.turns for segment in turn.segments)

    @property
    def images(self) -> tuple[Image, ...]:
        """Return what it was shown after the prompt, in the order of their placeholders."""
        return tuple(image for reply in self.replies for image in reply.images)

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(turn.ids) for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token; lag is counted from it. 0 when there is no token."""
        return min((segment.version for segment in self.segments), default=0)

    @property
    def num_versions(self) -> int:
        """Return how many policy versions sampled it."""
        return len({segment.version for segment in self.segments})

    @property
    def stop_reason(self) -> StopReason:
        """Reason why its last turn ended."""
        return self.turns[-1].stop_reason

    @property
    def text(self) -> str:
        """The model's output and, between its turns, the replies it was given, for people to read."""
        texts = [turn.text for turn in self.turns]
        return texts[0] + "".join(reply.text + text for reply, text in zip(self.replies, texts[1:], strict=True))

    def to_sequence(self, prompt_ids: Ids, images: tuple[Image, ...] = ()) -> TrainSequence:
        """Return the prompt and this trajectory, with the loss on what was sampled.

        Args:
            prompt_ids: [P] int32, of the group; a prompt of its own goes before.
            images: of the prompt, in the order of their placeholders; those of the replies come after them.
        """
        prompt_ids = prompt_ids if self.prompt_ids is None else self.prompt_ids
        mask = np.concatenate([np.zeros(len(prompt_ids), np.bool_), self.loss_mask])
        ids = np.concatenate([prompt_ids, self.ids])
        routes = tuple(turn.routes for turn in self.turns if turn.routes is not None)
        return TrainSequence(ids=ids, loss_mask=mask, images=(*images, *self.images), routes=routes)

    def _parts(self) -> list[tuple[Ids, bool]]:
        """Tokens in order, by turns, with whether they were sampled."""
        parts = [(self.turns[0].ids, True)]
        for reply, turn in zip(self.replies, self.turns[1:], strict=True):
            parts += [(reply.ids, False), (turn.ids, True)]
        return parts
