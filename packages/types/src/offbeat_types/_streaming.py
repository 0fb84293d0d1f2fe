"""Engines that tell of tokens while they sample them."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from offbeat_types._requests import GenerateRequest
from offbeat_types._rollout import Completion, RolloutEngine

TellToken = Callable[[int, int, float], None]
"""Called with the number of the sample in its request, the token's id and its log-probability, nats."""


@runtime_checkable
class StreamingEngine(RolloutEngine, Protocol):
    """A rollout engine that tells of each token when it is sampled."""

    async def stream(self, request: GenerateRequest, tell: TellToken) -> list[Completion]:
        """Do what `generate` does, and call `tell` in the event loop for each token before the completions return."""
        ...
