"""Problems of a configuration besides values that do not fit: models, data, the engine and contradictions."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from offbeat_core import ConfigError, ProblemsError, require_backend
from offbeat_data import check_data_paths
from offbeat_objectives import check_preference
from offbeat_run import Problems, check_trackers, find_model_problems
from sft_app._config import SftConfig


def find_problems(sections: Mapping[str, Any], failed: Collection[str]) -> list[str]:
    """Return what is wrong with a configuration besides what its loader says; see `offbeat_core.load_config`.

    Args:
        sections: with the values that fit, by the fields of `SftConfig`.
        failed: names of the sections that have others.
    """
    problems = Problems()
    models = {"model": sections["model"]} if "model" in sections else {}
    if "data" in sections:
        with problems.collected():
            check_data_paths(sections["data"])
    if "preference" in sections and "preference" not in failed:
        with problems.collected():
            check_preference(sections["preference"])
    if "engine" in sections and "cluster" in sections:
        with problems.collected():
            _check_backends(sections["cluster"].launcher, sections["engine"].backend)
    return [*find_model_problems(models), *problems.texts]


def list_needs(config: SftConfig) -> dict[str, Callable[[], object]]:
    """Return what a run needs, by what names it; see `offbeat_run.doctor_command`."""
    return {
        "backends": lambda: _check_backends(config.cluster.launcher, config.engine.backend),
        "models": lambda: _check_models(config),
        "data": lambda: check_data_paths(config.data),
        "devices": lambda: _check_device(config),
        "log.trackers": lambda: check_trackers(config.log),
    }


def _check_backends(launcher: str, engine: str) -> bool:
    """Return whether the launcher reserves nodes elsewhere, where the engine is then needed."""
    is_elsewhere: bool = require_backend("offbeat.launcher", launcher).reserves
    if not is_elsewhere:
        require_backend("offbeat.engine", engine)
    return is_elsewhere


def _check_models(config: SftConfig) -> None:
    if found := find_model_problems({"model": config.model}):
        raise ProblemsError(*found)


def _check_device(config: SftConfig) -> None:
    from offbeat_device import rank_device  # imports torch

    if not _check_backends(config.cluster.launcher, config.engine.backend):
        rank_device(config.engine.device, 0, config.engine.num_ranks, setting="engine.device")


def check_settings(config: SftConfig, problems: Problems) -> None:
    """Collect contradictions between sections that settings alone tell."""
    data = config.data
    with problems.collected():
        check_preference(config.preference)
    with problems.collected():
        if not (data.epochs or config.engine.max_updates):
            raise ConfigError("the run would never end: set data.epochs or engine.max_updates above 0")
    with problems.collected():
        if config.validates_every and not (data.eval_size or data.eval_path or data.eval_split):
            raise ConfigError(NEEDS_HELD_OUT)


NEEDS_HELD_OUT = "eval.every_updates needs held-out data: set data.eval_size or data.eval_path, or set it to 0"
