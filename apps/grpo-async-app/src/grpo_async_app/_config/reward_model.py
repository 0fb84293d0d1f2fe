"""The reward model of a run: the table `reward.reward_model`, and what is wrong with it."""

import json
from dataclasses import dataclass
from typing import Any

from offbeat_core import ConfigError, ModelError, read_options, setting
from offbeat_data import RewardConfig
from offbeat_run import check_model, inspect_model


@dataclass(frozen=True, kw_only=True)
class RewardModelOptions:
    """The table `reward.reward_model`."""

    path: str = setting("", "Folder or Hub name of a sequence classification model with one label.", hub="model")
    input: str = setting(
        "auto",
        "What it reads: chat, the row's messages and the answer through its own chat template; text, the prompt as "
        "the policy saw it and the answer; auto: chat where it has a template.",
        choices=("auto", "chat", "text"),
    )
    num_replicas: int = setting(1, "Replicas side by side, each in a process of its own.", "replicas", ge=1, le=65536)
    device: str = setting("auto", "auto, cpu, or a device such as cuda:0.")
    dtype: str = setting("float32", "Of its weights.", choices=("float32", "bfloat16", "float16"))
    max_batch: int = setting(16, "Completions that it reads at once at most.", "completions", ge=1)
    max_tokens: int = setting(4096, "Of prompt and completion; a longer one cannot be scored.", "tokens", ge=1)
    squash: str = setting(
        "none", "none: the reward is its logit; sigmoid: the logit between 0 and 1.", choices=("none", "sigmoid")
    )
    deadline_s: float = setting(300.0, "For the completions of one prompt, once a replica serves.", "s", gt=0)


@dataclass(frozen=True, kw_only=True)
class RewardModelAsk:
    """Completions of one prompt, for a reward model.

    Args:
        messages: what was asked as chat messages, (role, content) each; empty where the data has a text.
        text: the prompt as the policy has read it, with the marks of `Tokenizer.escape` in its words.
        completions: of it.
    """

    messages: list[tuple[str, str]]
    text: str
    completions: list[str]


def reward_model_of(reward: RewardConfig) -> RewardModelOptions | None:
    """Return the options of the reward model, where the run has one.

    Raises:
        ConfigError: an option that cannot be, or no path.
    """
    if not reward.uses_reward_model:
        return None
    options = read_options("reward.reward_model", RewardModelOptions, reward.reward_model)
    if not options.path:
        raise ConfigError("the reward reward_model needs reward.reward_model.path, a Hugging Face folder")
    return options


def check_one_reward_model(section: RewardConfig, own: RewardConfig, where: str = "reward") -> None:
    """Refuse a reward of its own, at `where`, that asks another reward model than section `reward` does.

    Raises:
        ConfigError: a run has one, and so both ask the same or the section alone does.
    """
    is_shared = section.uses_reward_model and own.reward_model == section.reward_model
    if own.uses_reward_model and not is_shared:
        raise ConfigError(
            f"{where} asks a reward model that section reward does not ask: a run has one, so let both "
            "name reward_model, with the same table"
        )


def check_reward_model(options: RewardModelOptions) -> None:
    """Refuse a folder that holds no model with one score, and texts so long that their scores depend on each other.

    Raises:
        ModelError: no folder of a model, or one of another kind.
        ConfigError: max_tokens is above what the model's rotary embeddings read one text at a time.
    """
    folder = inspect_model(options.path, "reward.reward_model.path")
    check_model(folder.path)
    config = json.loads((folder.path / "config.json").read_text())
    names, labels = config.get("architectures") or ["no architecture"], config.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else 2
    if not any(str(name).endswith("ForSequenceClassification") for name in names) or num_labels != 1:
        raise ModelError(
            f"reward.reward_model.path = {options.path}: needed is a sequence classification model with one label, got "
            f"{', '.join(map(str, names))} with {num_labels}"
        )
    _check_rotary_limit(options, config.get("text_config", config))


def _check_rotary_limit(options: RewardModelOptions, config: dict[str, Any]) -> None:
    """Refuse lengths beyond which transformers takes rotary frequencies by the longest text of a call.

    Source: `dynamic_rope_update` in transformers, modeling_rope_utils.py.
    """
    whole = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for rope in (whole, *(each for each in whole.values() if isinstance(each, dict))):  # one for each kind of layer
        kind = str(rope.get("rope_type") or rope.get("type") or "")
        if kind != "longrope" and "dynamic" not in kind:
            continue
        key = "original_max_position_embeddings" if kind == "longrope" else "max_position_embeddings"
        limit = rope.get(key) or config.get(key) or config["max_position_embeddings"]
        if options.max_tokens > limit:
            raise ConfigError(
                f"reward.reward_model.max_tokens = {options.max_tokens}: with rope_type {kind!r} a text's score "
                f"depends on the texts read beside it once one is longer than {key} = {limit}; set it to at most "
                f"{limit}"
            )
