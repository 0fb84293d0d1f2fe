"""What an engine is asked that scores tokens which somebody else has sampled: a teacher.

Shapes: P prompt tokens, T tokens of one continuation.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from offbeat_types._errors import ConfigError, DataError
from offbeat_types._requests import Ids, Image, check_images
from offbeat_types._rollout import Floats, RolloutCapabilities, RolloutEngine


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """Continuations of one prompt, each to be scored token by token under the engine's own model.

    Args:
        request_id: unique among requests in flight.
        prompt_ids: [P] int32, P >= 1.
        continuations: each [T] int32; T may be 0.
        temperature: of the distribution, softmax(logits / temperature), > 0; nothing is cut from it.
        images: of the prompt, each [H, W, 3] uint8, in the order of their placeholders; see `GenerateRequest`.
    """

    request_id: str
    prompt_ids: Ids
    continuations: tuple[Ids, ...]
    temperature: float = 1.0
    images: tuple[Image, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the prompt and the longest continuation."""
        return len(self.prompt_ids) + max((len(ids) for ids in self.continuations), default=0)

    def check(self, vocab_size: int, max_model_len: int) -> None:
        """Refuse what no model of this size can score.

        Raises:
            DataError: no prompt, unknown ids, a sequence that is too long, or a temperature that is none.
        """
        name = f"score request {self.request_id!r}"
        if not self.temperature > 0:
            raise DataError(f"{name}: temperature must be above 0, got {self.temperature}")
        check_images(self.images, name)
        if any(ids.ndim != 1 for ids in (self.prompt_ids, *self.continuations)) or not len(self.prompt_ids):
            raise DataError(f"{name}: needs a prompt of at least one token, and continuations, in one dimension each")
        low = min(int(ids.min()) for ids in (self.prompt_ids, *self.continuations) if len(ids))
        high = max(int(ids.max()) for ids in (self.prompt_ids, *self.continuations) if len(ids))
        if low < 0 or high >= vocab_size:
            raise DataError(
                f"{name}: ids must be in [0, {vocab_size}), got {low} to {high}; teacher and student need one tokenizer"
            )
        if self.longest > max_model_len:
            raise DataError(
                f"{name}: prompt and continuation have {self.longest} tokens and max_model_len is {max_model_len}; "
                "raise it"
            )

    def check_images(self, capabilities: RolloutCapabilities, engine: str) -> None:
        """Refuse images where the engine scores none.

        Raises:
            ConfigError: it scores none.
        """
        if self.images and not capabilities.scores_images:
            raise ConfigError(
                f"score request {self.request_id!r} holds images, and this {engine} scores text alone: take a "
                "vision-language model, with a backend that scores images, such as torch"
            )


@runtime_checkable
class ScoringEngine(RolloutEngine, Protocol):
    """A rollout engine that scores, too. Its capabilities declare it (`RolloutCapabilities.scores`)."""

    async def score(self, request: ScoreRequest) -> list[Floats]:
        """Log-probabilities of the continuations' tokens under the weights that are served.

        While the engine is paused or sleeps it scores nothing: the call waits, or raises.

        Returns:
            One [T] float32 for each continuation, nats, in order.

        Raises:
            DataError: see `ScoreRequest.check`.
            ConfigError: a temperature that the engine cannot score at.
        """
        ...
