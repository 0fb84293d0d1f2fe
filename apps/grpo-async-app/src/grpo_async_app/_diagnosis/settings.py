"""Settings of a diagnosis, and the run as it is started for one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_async_app._config.agent import AgentConfig
from grpo_async_app._config.critic import CriticConfig
from grpo_async_app._config.sections import EvalConfig, GrpoConfig, TeacherConfig
from grpo_async_app._preflight.preflight import Preflight
from grpo_async_app._shrink_reward import REWARD
from offbeat_core import ConfigError
from offbeat_data import CurriculumConfig, EnvironmentConfig, RewardConfig
from offbeat_objectives import AlgorithmConfig


@dataclass(frozen=True, kw_only=True)
class Examined:
    """Settings of a diagnosis.

    Args:
        preflight: of the run as `for_diagnosis` has it.
        checkpoint: whose weights are examined; None: the model that the run starts from.
        step: updates done by them.
        num_samples: of the engine, about.
        log_folder: takes the logs of the roles.
    """

    preflight: Preflight
    checkpoint: Path | None
    step: int
    num_samples: int
    log_folder: Path

    @property
    def weights(self) -> Path:
        return self.checkpoint or self.preflight.model.path


def for_diagnosis(config: GrpoConfig) -> GrpoConfig:
    """Return the run with one engine, and without what only judges, teaches, validates or serves.

    Raises:
        ConfigError: its trainer and engines take turns on one device, or its prompts have turns of others.
    """
    if config.cluster.colocate:
        raise ConfigError(
            "diagnose has trainer and engine up at once, and cluster.colocate = true lets them take turns: give "
            "--cluster.colocate false, with devices for both"
        )
    return replace(
        config,
        curriculum=CurriculumConfig(),
        reward=RewardConfig(name=REWARD),  # nothing is judged
        teacher=TeacherConfig(),
        critic=CriticConfig(),
        agent=AgentConfig(),
        environment=EnvironmentConfig(),
        algorithm=AlgorithmConfig(),
        engine=replace(config.engine, options=_without_copies(config.engine.options)),
        rollout=replace(config.rollout, num_engines=1, serve_port=None, full_sync_every=1),
        log=replace(config.log, trackers=()),
        eval=EvalConfig(every_updates=0),
        profile=replace(config.profile, steps=""),
    )


def _without_copies(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trainer's options without the copies by which ranks are replaced, which nothing is trained for."""
    return {name: value for name, value in options.items() if name != "peer_copies"}
