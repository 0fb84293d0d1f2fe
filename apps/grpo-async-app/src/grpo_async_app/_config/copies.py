"""Copies that the trainer's ranks hold of each other's state: whether a run has them, and may have them."""

from grpo_async_app._config.sections import GrpoConfig
from offbeat_core import ConfigError


def keeps_copies(config: GrpoConfig) -> bool:
    """Return whether the trainer's ranks hold copies of each other's state."""
    return bool(config.engine.options.get("peer_copies"))


def check_healing(config: GrpoConfig) -> None:
    """Refuse copies from which no rank could be replaced.

    Raises:
        ConfigError: with what to change.
    """
    hindrance = ""
    if config.algorithm.needs_critic:
        hindrance = "a critic (algorithm.advantage = gae), of whose state no copies are kept"
    elif config.cluster.colocate:
        hindrance = "engines that share their devices with the trainer (cluster.colocate)"
    if keeps_copies(config) and hindrance:
        raise ConfigError(
            "engine.options.peer_copies replaces a rank of the trainer that dies, but not beside "
            f"{hindrance}: set it to false"
        )
