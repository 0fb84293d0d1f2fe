"""The critic of a run: section `critic`, and what is wrong with it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offbeat_core import ConfigError, TrainBackend, load_backend, setting
from offbeat_data import Tokenizer, load_tokenizer
from offbeat_run import ExaminedModel, check_model, inspect_model

CRITIC_FOLDER: Final = "critic"
"""Folder of the critic, beside the policy in a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Section `critic`: the value model of `algorithm.advantage = "gae"`, trained by the ranks that train the policy.

    What is not here, such as its schedule or its micro-batches, is as in section `engine`.
    """

    backend: str = setting("torch", "Training engine, whichever trains the policy: one with a head for values.")
    path: str = setting(
        "",
        "Folder or Hub name of what it starts from, such as a reward model's, with the policy's tokenizer; empty: the "
        "policy's. A folder without a head of one score gets a new one.",
        hub="model",
    )
    learning_rate: float = setting(1e-5, "Peak learning rate of its own optimizer.", ge=0)
    warmup_updates: int = setting(
        0, "Updates at the beginning in which it learns alone, and the policy stays as it is.", "updates", ge=0
    )
    clip: float | None = setting(
        0.2, "How far a value may move in an update before its loss stops pulling; none: as far as it likes.", gt=0
    )
    gae_lambda: float | None = setting(
        None,
        "λ of what its values should become; algorithm.gae_lambda if not given. 1: the rewards still to come.",
        ge=0,
        le=1,
    )
    bootstrap_truncated: bool = setting(
        False,
        "The value after a trajectory that was cut off by a limit is the critic's own there, as if it continued; "
        "false: 0, as after one that has ended, for a reward that judges what was cut off as it stands.",
    )
    options: dict[str, Any] = setting({}, "Extras of the backend, checked against its own settings.")


def check_critic(critic: CriticConfig, *, is_asked: bool, masks_truncated: bool) -> None:
    """Refuse a critic without an advantage that asks it, and values of samples that are not learned from."""
    if critic.bootstrap_truncated and masks_truncated:
        raise ConfigError(
            "critic.bootstrap_truncated has no effect with algorithm.mask_truncated, which leaves samples that were "
            "cut off out of the loss: set one of them to false"
        )
    if critic != CriticConfig() and not is_asked:
        raise ConfigError('the section critic has no effect without algorithm.advantage = "gae": leave it out')


def check_bootstrap(critic: CriticConfig, policy: ExaminedModel, max_model_len: int) -> None:
    """Refuse a value after the longest trajectory where the critic has no position for one token more."""
    if not critic.bootstrap_truncated:
        return
    folder = inspect_model(critic.path, "critic.path") if critic.path else policy
    if folder.max_positions and max_model_len >= folder.max_positions:
        raise ConfigError(
            f"critic.bootstrap_truncated asks for a value after rollout.max_model_len = {max_model_len} tokens, and "
            f"{folder.path} has {folder.max_positions} positions: set rollout.max_model_len to "
            f"{folder.max_positions - 1} at most"
        )


def check_critic_folder(critic: CriticConfig, tokenizer: Tokenizer, *, trust: bool) -> None:
    """Refuse a critic that reads other tokens than the policy writes.

    Raises:
        ConfigError: with the setting to change.
        ModelError: there is no model in its folder.
    """
    if not critic.path:
        return
    folder = inspect_model(critic.path, "critic.path")
    check_model(folder.path)
    difference = tokenizer.first_difference(load_tokenizer(folder.path, trust))
    if difference:
        raise ConfigError(
            f"critic.path = {critic.path} has another tokenizer than the policy ({difference}): take a model of the "
            "same family"
        )


def check_critic_is_kept(checkpoint: Path) -> None:
    """Refuse to continue with a critic from a checkpoint that was written without one."""
    if not (checkpoint / CRITIC_FOLDER).is_dir():
        raise ConfigError(
            f'algorithm.advantage = "gae" needs the critic of the run, and {checkpoint} holds none: resume with the '
            "advantage that the run was begun with, or start a new run with model.path set to this checkpoint"
        )


def load_critic_backend(name: str) -> TrainBackend:
    """Return the engine that trains the critic.

    Raises:
        BackendError: it is not installed.
        ConfigError: it trains no values.
    """
    backend: TrainBackend = load_backend("offbeat.engine", name)
    if "score" not in getattr(backend, "heads", ("tokens",)):
        raise ConfigError(f'critic.backend = {name!r} has no head for values: set critic.backend = "torch"')
    return backend
