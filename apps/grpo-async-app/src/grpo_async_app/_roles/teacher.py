"""The teacher role: one replica of the teacher, an engine of any rollout backend that scores."""

import numpy as np

from offbeat_types import (
    ConfigError,
    EngineHealth,
    Floats,
    RolloutEngineConfig,
    ScoreRequest,
    ScoringEngine,
    load_backend,
)


class TeacherRole:
    """Scores what the policy has sampled; its weights stay those of its folder.

    Args:
        backend: name under the entry-point group `offbeat.rollout`.
        temperature: of the policy's samples, at which it will be asked.
        images: prompts will have some.
    """

    _engine: ScoringEngine

    def __init__(self, *, backend: str, config: RolloutEngineConfig, temperature: float, images: bool = False) -> None:
        self._backend, self._config, self._temperature, self._images = backend, config, temperature, images

    async def start(self) -> None:
        """Load the model, and score two tokens, so that what cannot be is known before anything is sampled."""
        engine = await load_backend("offbeat.rollout", self._backend).create(self._config)
        if not engine.capabilities.scores:
            await engine.close()
            raise ConfigError(
                f"teacher.backend = {self._backend!r} does not score tokens that others have sampled, with these "
                "teacher.options: take another, such as torch"
            )
        if self._images and not engine.capabilities.scores_images:
            await engine.close()
            raise ConfigError(
                f"prompts have images, and an engine of teacher.backend = {self._backend!r} with teacher.path = "
                f"{self._config.model_path} scores text alone: take a vision-language model, served by a backend that "
                "scores images, such as torch"
            )
        self._engine = engine
        ids = np.zeros(1, np.int32)
        trial = ScoreRequest(request_id="trial", prompt_ids=ids, continuations=(ids,), temperature=self._temperature)
        await self._engine.score(trial)

    async def score(self, request: ScoreRequest) -> list[Floats]:
        return await self._engine.score(request)

    async def health(self) -> EngineHealth:
        return await self._engine.health()

    async def close(self) -> None:
        await self._engine.close()
