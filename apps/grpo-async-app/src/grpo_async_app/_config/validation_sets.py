"""The validation sets of a run: their prompts, and how each is sampled and judged."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_async_app._config.reward_model import check_one_reward_model
from grpo_async_app._config.sections import EvalSetConfig, GrpoConfig, set_environment_key
from grpo_async_app._config.sources import (
    Tools,
    check_comparing,
    check_own_data,
    own_data,
    reward_beside,
    scored_alone,
    with_tools,
)
from offbeat_core import ConfigError, SamplingParams
from offbeat_data import (
    EnvironmentConfig,
    Prompt,
    RewardConfig,
    Tokenizer,
    build_environment,
    build_reward,
    load_prompts,
)
from offbeat_run import HELD_OUT


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """One set.

    Args:
        name: such as "aime"; "held-out" for the prompts of section data.
        prompts: its items.
        params: how they are sampled; the seed is of the first item.
        num_samples: of each item.
        k: of pass@k and maj@k; empty: the number of samples.
        success_reward: from which on a sample is right.
        reward: that judges it, and says where in a completion the answer is.
        has_own_reward: whether it is not that of section reward.
        environment: that answers the model; one without a name is none.
        environment_key: of it in `GrpoConfig.environments`.
    """

    name: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    num_samples: int = 1
    k: tuple[int, ...] = ()
    success_reward: float = 0.99
    reward: RewardConfig
    has_own_reward: bool = False
    environment: EnvironmentConfig
    environment_key: str = ""

    @property
    def has_turns(self) -> bool:
        return bool(self.environment.name)

    def describe(self) -> str:
        """For a plan."""
        how = "greedy" if not self.params.temperature else f"temperature {self.params.temperature:g}"
        samples = f"{self.num_samples} samples each, " if self.num_samples > 1 else ""
        text = f"{self.name}: {len(self.prompts)} prompts, {samples}{how}, at most {self.params.max_tokens} tokens"
        return f"{text}, environment {self.environment.name}" if self.environment_key else text


def held_out_set(config: GrpoConfig, prompts: Sequence[Prompt]) -> ValidationSet:
    """Return the prompts that section `data` holds out."""
    rollout = config.rollout
    return ValidationSet(
        name=HELD_OUT,
        prompts=tuple(prompts),
        params=SamplingParams(
            max_tokens=rollout.max_tokens,
            temperature=config.eval.temperature,
            stop=tuple(rollout.stop),
            seed=rollout.seed,
        ),
        success_reward=config.eval.success_reward,
        reward=config.reward,
        environment=config.environment,
    )


def load_sets(
    config: GrpoConfig, tokenizer: Tokenizer, tools: Tools, names: Sequence[str] | None = None
) -> list[ValidationSet]:
    """Read the sets of `eval.sets`.

    Args:
        config: of the run.
        tokenizer: of the model.
        tools: of the environments.
        names: of those to read; None: all.

    Raises:
        DataError, ConfigError, BackendError: as `load_prompts`, with the name of the set.
    """
    chosen = config.eval.sets if names is None else {name: config.eval.sets[name] for name in names}
    return [_load(config, name, each, tokenizer, tools) for name, each in chosen.items()]


def _load(config: GrpoConfig, name: str, own: EvalSetConfig, tokenizer: Tokenizer, tools: Tools) -> ValidationSet:
    reward, data, rollout = own.reward or config.reward, config.data, config.rollout
    environment = own.environment or config.environment
    if own.environment is not None:
        reward = own.reward or reward_beside(environment, config.reward)
        _check_environment(name, environment, reward, own.path)
    if not reward.is_set and not environment.name:
        raise ConfigError(f"eval.sets.{name} needs something that judges: set reward.name, or eval.sets.{name}.reward")
    if reward.is_set:
        try:
            check_comparing(build_reward(reward), scored_alone(config, environment))
        except ConfigError as error:
            raise ConfigError(f"eval.sets.{name}: {error}") from error
    check_one_reward_model(config.reward, reward, f"eval.sets.{name}.reward")
    key = set_environment_key(name) if own.environment is not None else ""
    source = with_tools(own_data(data, own), tools.get(key, []))
    max_tokens = own.max_tokens or rollout.max_tokens
    longest, limit = data.max_prompt_tokens + max_tokens, "max_tokens"
    if environment.name:
        longest, limit = data.max_prompt_tokens + environment.max_tokens, "environment.max_tokens"
    if longest > rollout.max_model_len:
        raise ConfigError(
            f"data.max_prompt_tokens + eval.sets.{name}.{limit} = {longest} is more "
            f"than rollout.max_model_len = {rollout.max_model_len}: raise the last or lower one of the others"
        )
    return ValidationSet(
        name=name,
        prompts=load_prompts(source, tokenizer, needs_answer=reward.needs_answer).train,
        params=SamplingParams(
            max_tokens=max_tokens,
            temperature=own.temperature,
            top_p=own.top_p,
            top_k=own.top_k,
            min_p=own.min_p,
            stop=tuple(rollout.stop),
            seed=rollout.seed,
        ),
        num_samples=own.n,
        k=tuple(own.k),
        success_reward=own.success_reward,
        reward=reward,
        has_own_reward=own.reward is not None,
        environment=environment,
        environment_key=key,
    )


def _check_environment(name: str, environment: EnvironmentConfig, reward: RewardConfig, path: str) -> None:
    """Refuse an environment of its own that does not go with a set."""
    try:
        environment.check(has_reward=reward.is_set)
        check_own_data(environment, path, "path")
    except ConfigError as error:
        raise ConfigError(f"eval.sets.{name}: {error}") from error
    if environment.name:
        build_environment(environment)


def check_validated(config: GrpoConfig, *, has_sets: bool) -> None:
    """Refuse validations without prompts, and what has no effect without validations.

    Raises:
        ConfigError: with what to set.
    """
    if config.validates_every and not has_sets:
        raise ConfigError(
            "eval.every_updates needs held-out prompts: set data.eval_size, data.eval_path or a table "
            "[eval.sets.NAME], or set it to 0"
        )
    if config.eval.stop_at_accuracy and not config.validates_every:
        raise ConfigError(
            f"eval.stop_at_accuracy = {config.eval.stop_at_accuracy:g} has no effect without validations: set "
            "eval.every_updates, or leave it out"
        )


def shared_notices(sets: Sequence[ValidationSet], train: Sequence[Prompt]) -> list[str]:
    """Return notices of sets whose prompts are trained on."""
    trained = {prompt.ids.tobytes() for prompt in train} if sets else set()
    counts = {each.name: sum(prompt.ids.tobytes() in trained for prompt in each.prompts) for each in sets}
    return [
        f"{count} prompts of eval.sets.{name} are also training prompts: on these it measures memory"
        for name, count in counts.items()
        if count
    ]


def alone_notices(sets: Sequence[ValidationSet]) -> list[str]:
    """Return notices about sets in which a reward that compares has nothing to compare with."""
    return [
        f"reward {', '.join(comparing)} compares the completions of a prompt, and validation set {each.name} samples "
        "one: its reward there says nothing; give a table of eval.sets n above 1, or a reward of its own"
        for each in sets
        if each.num_samples == 1 and each.reward.is_set and (comparing := build_reward(each.reward).comparing)
    ]


def mark_of(prompts: Sequence[Prompt]) -> dict[str, int | str]:
    """Return how many prompts there are, and which: with the settings, the order of training is a function of these."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(len(prompt.ids).to_bytes(8, "little") + prompt.ids.tobytes())
    return {"number": len(prompts), "sha256": digest.hexdigest()}
