"""Finds the environment that a configuration names."""

from collections.abc import Callable
from typing import Any, Final

from offbeat_data._environment import Environment, EnvironmentConfig, EnvironmentFactory
from offbeat_data._user_function import find_function
from offbeat_types import ConfigError


def build_environment(config: EnvironmentConfig) -> EnvironmentFactory:
    """Find the environment of a configuration, and import what it needs now rather than in its first episode.

    Raises:
        ConfigError: no such module or name, or options that it does not take.
        BackendError: a package that it needs is not installed.
    """
    make = _BUILT_IN[config.name]() if config.name in _BUILT_IN else find_function("environment", config.name)

    def build() -> Environment:
        environment: Environment = make(**config.options)
        return environment

    try:
        build()
    except TypeError as error:
        raise ConfigError(f"environment.options: {config.name} refuses {config.options}: {error}") from error
    return build


def _calculator() -> Callable[..., Any]:
    from offbeat_data._calculator import calculator

    return calculator


def _reasoning_gym() -> Callable[..., Any]:
    from offbeat_data._reasoning_gym import import_reasoning_gym
    from offbeat_data._reasoning_gym_environment import ReasoningGymEnvironment

    import_reasoning_gym()
    return ReasoningGymEnvironment


def _verifiers() -> Callable[..., Any]:
    from offbeat_data._verifiers import import_verifiers
    from offbeat_data._verifiers_environment import VerifiersEnvironment

    import_verifiers()
    return VerifiersEnvironment


_BUILT_IN: Final[dict[str, Callable[[], Callable[..., Any]]]] = {
    "calculator": _calculator,
    "reasoning_gym": _reasoning_gym,
    "verifiers": _verifiers,
}
