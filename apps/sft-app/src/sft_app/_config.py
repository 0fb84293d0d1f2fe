"""The configuration of a run: one section per class."""

from dataclasses import dataclass, field, fields
from typing import Final

from offbeat_actors import ClusterConfig, available_cpus
from offbeat_core import REQUIRED, TrainEngineConfig, TrainEngineSettings, load_backend, setting
from offbeat_data import ConversationConfig
from offbeat_objectives import PreferenceConfig
from offbeat_placement import BudgetSettings
from offbeat_run import VALIDATED_EVERY, CheckpointConfig, LivenessConfig, LogConfig, ProfileConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Section `model`: what is fine-tuned."""

    path: str = setting(
        REQUIRED,
        "A causal language model: a folder, or a name of the Hub. The folder has config, safetensors and tokenizer; "
        "the name is as Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@REVISION.",
        hub="model",
    )
    trust_remote_code: bool = setting(False, "Run code that comes with the model folder.")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(BudgetSettings):
    """Section `engine`: the trainer. `lora_rank` above 0 trains adapters instead of all weights."""

    backend: str = setting("torch", "Training engine: torch, or another that is installed.")
    dtype: str = setting(
        "auto",
        "Number format of the matrix products, whose weights are kept in float32; auto: bfloat16 on an accelerator, "
        "float32 on CPUs.",
        choices=("auto", "float32", "bfloat16"),
    )
    num_ranks: int = setting(
        1, "Processes that train together, each with a device or a share of the CPUs.", ge=1, le=65536
    )
    update_deadline_s: float = setting(7200.0, "Longest time for one update or checkpoint of several ranks.", "s", gt=0)
    batch_size: int = setting(
        32, "Sequences in one optimizer step; pairs, or rated answers, where preferences are learned.", "rows", ge=1
    )
    max_updates: int = setting(0, "End the run after so many steps; 0: when the data ends.", "updates", ge=0)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Section `eval`: the loss, and what else it reports, on held-out rows during training."""

    every_updates: int | None = setting(
        None,
        "Updates between two validations, besides one before training and one at its end; 0: none at all. Not given: "
        f"{VALIDATED_EVERY} where section data holds rows out, else none.",
        "updates",
        ge=0,
    )
    max_sequences: int = setting(0, "Held-out sequences (pairs, answers) used; 0 uses all.", "rows", ge=0)


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """All settings of a run of `sft-app`."""

    model: ModelConfig
    data: ConversationConfig
    engine: EngineConfig = field(default_factory=EngineConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @property
    def validates_every(self) -> int:
        """Updates between two validations; 0: none. By default held-out rows are used for validation."""
        if self.eval.every_updates is not None:
            return self.eval.every_updates
        holds_out = bool(self.data.eval_size or self.data.eval_path or self.data.eval_split)
        return VALIDATED_EVERY if holds_out else 0

    @property
    def has_ranks(self) -> bool:
        """Return whether processes of their own train; otherwise that of the command line does."""
        return self.engine.num_ranks > 1 or bool(load_backend("offbeat.launcher", self.cluster.launcher).reserves)

    @property
    def devices(self) -> dict[str, str]:
        """Return what the trainer computes on, by the setting that says so."""
        return {"engine.device": self.engine.device}

    @property
    def threads_per_rank(self) -> int:
        """0: as many as the process of the command line takes by itself."""
        share = max(1, available_cpus() // self.engine.num_ranks) if self.has_ranks else 0
        return self.cluster.trainer_threads or share

    def train_engine(self, num_updates: int) -> TrainEngineConfig:
        values = {each.name: getattr(self.engine, each.name) for each in fields(TrainEngineSettings)}
        return TrainEngineConfig(
            **values,
            model_path=self.model.path,
            trust_remote_code=self.model.trust_remote_code,
            total_steps=num_updates,
            num_threads=self.threads_per_rank,
            head=self.head,
        )

    @property
    def head(self) -> str:
        """Return the head of the model: see `TrainEngineConfig.head`."""
        return "score" if self.preference.loss == "reward" else "tokens"

    @property
    def rows_name(self) -> str:
        """Return what a batch is counted in."""
        return {"conversations": "sequences", "pairs": "pairs", "ratings": "answers"}[self.preference.rows]


EVERYDAY: Final = (
    "model.path",
    "data.path",
    "data.eval_size",
    "data.epochs",
    "data.max_sequence_tokens",
    "engine.device",
    "engine.num_ranks",
    "engine.batch_size",
    "engine.learning_rate",
    "engine.schedule",
    "engine.warmup_steps",
    "engine.max_tokens_per_microbatch",
    "engine.lora_rank",
    "engine.max_updates",
    "preference.loss",
    "preference.beta",
    "eval.every_updates",
    "checkpoint.every",
    "checkpoint.keep",
    "log.trackers",
)
"""Keys that `train --help` lists, in the order of the sections. A key that is added takes the place of another."""
