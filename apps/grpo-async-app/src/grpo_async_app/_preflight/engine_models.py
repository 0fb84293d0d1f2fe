"""Check the models that a run's engines serve, the policy's and the teacher's, before anything starts."""

from pathlib import Path

from grpo_async_app._config.sections import GrpoConfig
from offbeat_core import ConfigError, load_backend
from offbeat_data import Tokenizer, load_tokenizer
from offbeat_run import ExaminedModel, check_model, inspect_model


def check_positions(config: GrpoConfig, model: ExaminedModel, role: str = "") -> None:
    """Refuse prompts and completions that are longer than a model's positions."""
    if model.max_positions and config.rollout.max_model_len > model.max_positions:
        raise ConfigError(
            f"rollout.max_model_len = {config.rollout.max_model_len} is more than the {model.max_positions} positions "
            f"of {role}{model.path}: lower it"
        )


def check_engine_model(backend: str, model: ExaminedModel) -> None:
    """Refuse a model that engines of this backend would refuse once they are started."""
    if check := getattr(load_backend("offbeat.rollout", backend), "check_model", None):
        check(Path(model.path))


def check_teacher(config: GrpoConfig, tokenizer: Tokenizer) -> None:
    """Refuse a teacher that is not there, cannot be served, or means something else by a token."""
    teacher = config.teacher
    if not teacher.is_set:
        return
    folder = inspect_model(teacher.path, "teacher.path")
    check_model(folder.path)
    check_engine_model(teacher.backend, folder)
    check_positions(config, folder, "the teacher ")
    difference = tokenizer.first_difference(load_tokenizer(folder.path, config.model.trust_remote_code))
    if difference:
        raise ConfigError(
            f"the teacher {folder.path} has another tokenizer than {config.model.path} ({difference}), so its "
            "log-probabilities are of other texts: take a teacher of the same family"
        )
