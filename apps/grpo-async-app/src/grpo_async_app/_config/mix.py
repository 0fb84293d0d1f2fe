"""Tables `[data.mix.NAME]`: several sources of training prompts in one run, drawn by weights."""

from dataclasses import dataclass
from typing import Any

from offbeat_core import REQUIRED, ConfigError, setting
from offbeat_data import DataConfig, EnvironmentConfig, RewardConfig


@dataclass(frozen=True, kw_only=True)
class MixSourceConfig:
    """A table `[data.mix.NAME]`: one source of training prompts, and what answers and judges what is said to them."""

    path: str = setting(REQUIRED, "Where its prompts are: any form that data.path takes.", hub="dataset")
    split: str = setting("train", "Split to read, where the path holds several.")
    max_prompts: int = setting(0, "Prompts used; 0: all of a file, 1000 of a generator.", "prompts", ge=0)
    task_options: dict[str, Any] = setting({}, "Options of its task or environment; empty: data.task_options.")
    prompt_column: str = setting("", "Column of the prompt; empty: data.prompt_column.")
    answer_column: str = setting("", "Column of the reference answer; empty: data.answer_column.")
    system_prompt: str = setting("", "Put before conversations that have no system message; empty: data.system_prompt.")
    weight: float = setting(1.0, "Of the groups, it gets its weight over the sum of all weights.", ge=0, le=2**30)
    success_reward: float | None = setting(
        None, "A sample with at least this reward succeeds; none: curriculum.success_reward.", "reward"
    )
    environment: EnvironmentConfig | None = setting(
        None, "An environment of its own, with the keys of section environment; none: that one."
    )
    reward: RewardConfig | None = setting(None, "A reward of its own, with the keys of section reward; none: that one.")


@dataclass(frozen=True, kw_only=True)
class PromptsConfig(DataConfig):
    """Section `data`: prompts for reinforcement learning, from one source or a mix of several."""

    path: str = setting(
        "",
        "Training prompts: a file, a folder, a data set of the Hub or a generator. A .jsonl or .parquet file, a folder "
        "of them (or with them in data/, as the Hub has it), a folder written by datasets' save_to_disk, a data set of "
        "the Hub (openai/gsm8k, openai/gsm8k:main/train@REVISION), reasoning-gym:TASK, verifiers:NAME, openenv:URL, "
        "arithmetic:DIGITS (sums) or products:DIGITS. Empty where tables [data.mix.NAME] name several.",
        hub="dataset",
    )
    mix: dict[str, MixSourceConfig] = setting(
        {}, "Sources of training prompts, drawn by weights, under names of your own: tables [data.mix.NAME]."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mix:
            return
        if self.path:
            raise ConfigError(
                f"data.path = {self.path!r} and data.mix both name training prompts: leave data.path out, or make it "
                "one of the sources, in a table [data.mix.NAME]"
            )
        for key in ("eval_path", "eval_split", "eval_size", "num_items"):
            if getattr(self, key):
                advice = "max_prompts of the source" if key == "num_items" else "a table [eval.sets.NAME]"
                raise ConfigError(f"data.{key} has no effect with data.mix: take {advice} instead")
        if not any(each.weight for each in self.mix.values()):
            raise ConfigError("data.mix: the weights of all sources are 0, so none would be drawn: give one a weight")
