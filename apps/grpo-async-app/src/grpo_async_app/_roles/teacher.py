"""The teacher role: one replica of the teacher, an engine of any rollout backend that scores."""

import time

import numpy as np

from grpo_async_app._config.sections import GrpoConfig
from offbeat_core import (
    ConfigError,
    EngineHealth,
    Floats,
    ScoreRequest,
    ScoringEngine,
    load_backend,
)
from offbeat_run import log_line, log_loaded, log_start


class TeacherRole:
    """Scores what the policy has sampled; its weights stay those of its folder.

    Args:
        config: of the run.
        num_threads: of the engine.
        images: prompts will have some.
    """

    _engine: ScoringEngine

    def __init__(self, *, config: GrpoConfig, num_threads: int, images: bool = False) -> None:
        log_start(config.teacher.device, num_threads)
        self._config, self._num_threads, self._images = config, num_threads, images

    async def start(self) -> None:
        """Load the model, and score two tokens, so that what cannot be is known before anything is sampled."""
        teacher, settings = self._config.teacher, self._config.teacher_engine(self._num_threads)
        began_s = time.monotonic()
        engine = await load_backend("offbeat.rollout", teacher.backend).create(settings)
        log_loaded(settings.model_path, settings.dtype, began_s)
        if not engine.capabilities.scores:
            await engine.close()
            raise ConfigError(
                f"teacher.backend = {teacher.backend!r} does not score tokens that others have sampled, with these "
                "teacher.options: take another, such as torch"
            )
        if self._images and not engine.capabilities.scores_images:
            await engine.close()
            raise ConfigError(
                f"prompts have images, and an engine of teacher.backend = {teacher.backend!r} with teacher.path = "
                f"{teacher.path} scores text alone: take a vision-language model, served by a backend that "
                "scores images, such as torch"
            )
        self._engine = engine
        ids, temperature = np.zeros(1, np.int32), self._config.rollout.temperature
        trial = ScoreRequest(request_id="trial", prompt_ids=ids, continuations=(ids,), temperature=temperature)
        await self._engine.score(trial)
        log_line("ready")

    async def score(self, request: ScoreRequest) -> list[Floats]:
        return await self._engine.score(request)

    async def health(self) -> EngineHealth:
        return await self._engine.health()

    async def close(self) -> None:
        await self._engine.close()
        log_line("ended")
