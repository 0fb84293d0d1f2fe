"""Environments that answer with images: which models have to see them, as far as a configuration says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from offbeat_core import ConfigError, ModelError, Trajectory
from offbeat_data import EnvironmentConfig, load_image_rules

_SETTINGS: Final = {"mcp": "shows_images", "openenv": "image_field"}
"""Keys of `environment.options` by environment. What a user's own environment returns is known only when it runs."""


def check_environment_images(environment: EnvironmentConfig, model_path: Path, *, has_teacher: bool) -> None:
    """Refuse images that no model would see.

    Raises:
        ConfigError: there is a teacher.
        ModelError: the model takes no images.
    """
    setting = _SETTINGS.get(environment.name, "")
    if not setting or not environment.options.get(setting):
        return
    try:
        load_image_rules(model_path)
    except ModelError as error:
        raise ModelError(f"environment.options: {setting} shows images: {error}") from error
    if has_teacher:
        raise _blind_teacher()


def refuse_environment_images(trajectories: Sequence[Trajectory]) -> None:
    """Refuse to have a teacher score what an environment has shown: it would take the images for tokens.

    Raises:
        ConfigError: there are images.
    """
    if any(trajectory.images for trajectory in trajectories):
        raise _blind_teacher()


def _blind_teacher() -> ConfigError:
    return ConfigError(
        "the environment answers with images, and a teacher sees those of prompts only: leave the teacher out, or let "
        "the environment say texts only"
    )
