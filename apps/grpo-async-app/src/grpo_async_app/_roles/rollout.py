"""The rollout role: one rollout engine of any backend in a process of its own."""

import asyncio

from offbeat_types import (
    Completion,
    EngineHealth,
    GenerateRequest,
    PauseMode,
    RolloutEngine,
    RolloutEngineConfig,
    WeightProof,
    load_backend,
)
from offbeat_weightsync import receive


class RolloutRole:
    """Serves one engine, and takes its weights straight from the trainer.

    Args:
        backend: name under the entry-point group `offbeat.rollout`.
        config: the engine's.
    """

    _engine: RolloutEngine

    def __init__(self, *, backend: str, config: RolloutEngineConfig) -> None:
        self._backend, self._config = backend, config

    async def start(self) -> None:
        """Load the model."""
        self._engine = await load_backend("offbeat.rollout", self._backend).create(self._config)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        return await self._engine.generate(request)

    async def abort(self, request_id: str) -> None:
        """See `RolloutEngine.abort`."""
        await self._engine.abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutEngine.pause`."""
        await self._engine.pause(mode)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        await self._engine.resume()

    async def receive_weights(self, socket_path: str, version: int, deadline_s: float, name: str) -> WeightProof:
        """Take `version` from the trainer that listens on `socket_path`, and prove to it what arrived."""
        incoming = receive(socket_path, version, deadline_s, name=name)
        stream = await asyncio.to_thread(incoming.__enter__)
        try:
            proof = await self._engine.update_weights(stream, version)
            await asyncio.to_thread(stream.confirm, proof)
        except BaseException as error:
            incoming.__exit__(type(error), error, error.__traceback__)
            raise
        incoming.__exit__(None, None, None)
        return proof

    async def health(self) -> EngineHealth:
        """See `RolloutEngine.health`."""
        return await self._engine.health()

    async def close(self) -> None:
        """Free the engine."""
        await self._engine.close()
