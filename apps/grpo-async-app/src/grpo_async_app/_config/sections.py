"""The configuration of a run: one section per class, each declared where it is used."""

from dataclasses import dataclass, field, fields
from typing import Any, Final

from grpo_async_app._config.agent import AgentConfig
from grpo_async_app._config.critic import CriticConfig
from grpo_async_app._config.mix import PromptsConfig
from grpo_async_app._config.reward_model import reward_model_of
from offbeat_actors import ClusterConfig
from offbeat_async_policy import AsyncConfig
from offbeat_core import (
    REQUIRED,
    ConfigError,
    RoleName,
    RolloutEngineConfig,
    RolloutEngineSettings,
    SamplingParams,
    TrainEngineConfig,
    TrainEngineSettings,
    WeightPart,
    setting,
)
from offbeat_data import CurriculumConfig, EnvironmentConfig, RewardConfig
from offbeat_objectives import AlgorithmConfig
from offbeat_placement import BudgetSettings
from offbeat_run import HELD_OUT, VALIDATED_EVERY, CheckpointConfig, LivenessConfig, LogConfig, ProfileConfig

AUTO: Final = "auto"
"""A choice that is left to the machine: see `choose_for_platform` and `choose_backends`."""
LEAST_THAT_FITS: Final = -1
"""`cluster.sleep_level` that is left to the machine: see `choose_sleep_level`."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """Section `teacher`: the model that on-policy distillation learns from, served by replicas of its own."""

    path: str = setting(
        "", "Folder or Hub name of the teacher, with the policy's tokenizer; empty: no teacher.", hub="model"
    )
    backend: str = setting(
        AUTO, "Rollout engine that serves it: torch (embedded), or another that scores; auto: as rollout.backend."
    )
    num_replicas: int = setting(1, "Replicas side by side, each in a process of its own.", "replicas", ge=1, le=65536)
    device: str = setting("auto", "auto, cpu, or a device such as cuda:0.")
    dtype: str = setting("float32", "Number format of its weights.", choices=("float32", "bfloat16", "float16"))
    tensor_parallel: int = setting(1, "Devices that one replica is split over.", ge=1)
    colocate: bool = setting(
        False, "Replicas share the accelerators of the rollout engines, all of them loaded at once."
    )
    deadline_s: float = setting(600.0, "Longest time for the scores of one group, once a replica serves.", "s", gt=0)
    options: dict[str, Any] = setting({}, "Extras of the backend, checked against its own settings.")

    @property
    def is_set(self) -> bool:
        return bool(self.path)

    def check(self, *, is_learned_from: bool) -> None:
        """Refuse a teacher without a loss that uses it, or such a loss without a teacher."""
        if is_learned_from and not self.is_set:
            raise ConfigError(
                "algorithm.distillation_coefficient is above 0 and there is no teacher: set teacher.path to its folder"
            )
        if self.is_set and not is_learned_from:
            raise ConfigError(
                f"teacher.path = {self.path!r} has no effect while algorithm.distillation_coefficient is 0: set it to "
                "1, or leave the teacher out"
            )
        # The configuration in an older run's folder has every key, with the defaults of that time.
        if not self.is_set and self not in (TeacherConfig(), TeacherConfig(backend="torch")):
            raise ConfigError("the section teacher has no effect without teacher.path: set it or leave the section out")

    def engine(self, max_model_len: int, num_running: int, num_threads: int, *, trust: bool) -> RolloutEngineConfig:
        """Return what the backend is given; `max_model_len` is of the longest prompt with its completion."""
        return RolloutEngineConfig(
            model_path=self.path,
            trust_remote_code=trust,
            device=self.device,
            dtype=self.dtype,
            tensor_parallel=self.tensor_parallel,
            max_running=num_running,
            max_model_len=max_model_len + 1,  # vLLM scores a prompt only when it can sample one token more
            num_threads=num_threads,
            options=self.options,
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Section `model`: the policy to train."""

    path: str = setting(
        REQUIRED,
        "A causal language model: a folder, or a name of the Hub. The folder has config, safetensors and tokenizer; "
        "the name is as Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@REVISION.",
        hub="model",
    )
    trust_remote_code: bool = setting(False, "Run code that comes with the model folder.")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(RolloutEngineSettings):
    """Section `rollout`: the engines that sample, and how they sample."""

    backend: str = setting(
        AUTO,
        "Rollout engine: torch (embedded), or another that is installed; auto: vllm where the engines sample on an "
        "accelerator and it is installed for that, serves the model and can do what the run asks for; else torch.",
    )
    dtype: str = setting(
        AUTO,
        "Number format of the weights while sampling; auto: bfloat16 where the device or the CPU multiplies in it, "
        "else float32.",
        choices=(AUTO, "float32", "bfloat16", "float16"),
    )
    max_running: int = setting(
        0, "Samples decoded together at most; 0: 256 on an accelerator, 64 on CPUs.", "samples", ge=0, le=2**20
    )
    num_engines: int = setting(1, "Engines side by side, each in a process of its own.", "engines", ge=1, le=65536)
    samples_per_prompt: int = setting(
        8, "n: completions of one prompt, which make one group.", "samples", ge=1, le=65536
    )
    max_tokens: int = setting(
        256, "Longest completion; with an environment or an agent, the longest turn.", "tokens", ge=1, le=2**30
    )
    temperature: float = setting(1.0, "Temperature of the sampled distribution; the trainer scores at the same.", gt=0)
    top_p: float = setting(1.0, "Sample from the smallest set of tokens with this much probability.", gt=0, le=1)
    top_k: int = setting(0, "Sample from the k likeliest tokens; 0 from all.", "tokens", ge=0)
    min_p: float = setting(0.0, "Leave out tokens less likely than this share of the likeliest.", ge=0, lt=1)
    stop: list[str] = setting([], "Texts that end a completion.", is_text=True)
    seed: int = setting(0, "Seed of sampling; every sample draws from a stream of its own.", ge=0, lt=2**24)
    lora_sync: str = setting(
        "auto",
        "What engines get of a policy with engine.lora_rank: merged weights, or the adapter alone, if they take one; "
        "auto: the adapter where they do.",
        choices=("auto", "merged", "adapter"),
    )
    full_sync_every: int = setting(
        1,
        "Versions from one sync of all weights to the next; in between those elements travel that have changed, and "
        "trainer and engines keep a copy of the weights in main memory. 1: always all.",
        "versions",
        ge=1,
        le=2**30,
    )
    weight_transport: str = setting(
        "auto",
        "How weights reach the engines: shared-memory on the trainer's machine, cuda-ipc from each trainer rank on its "
        "GPU, tcp anywhere, nccl by broadcasts between GPUs (gloo between CPUs), disk through weight_folder; auto: "
        "cuda-ipc where a rank is on each engine's GPU, nccl where all have their own, shared-memory on one machine, "
        "else tcp.",
    )
    weight_folder: str = setting(
        "",
        "Where weight_transport = disk writes; trainer and engines see it. Empty: `weights` in the run folder.",
        path="output",
    )
    sync_bucket_bytes: int = setting(64 * 2**20, "Weights travel in buckets of this size.", "bytes", ge=4096)
    replay_routes: str = setting(
        AUTO,
        "Mixtures of experts: engines say which experts each token took, and the trainer takes the same (R3): on, or "
        "auto, which does so where engines and trainer can; measure: it only counts where it would choose others.",
        choices=(AUTO, "on", "measure", "off"),
    )
    serve_port: int | None = setting(
        None,
        "Serve the policy in training to agents outside: engine i at loopback, port serve_port + i; 0: free ones.",
        ge=0,
        le=65535,
    )

    @property
    def bytes_per_weight(self) -> int:
        """Bytes of a weight that travels, once `dtype` is settled."""
        return ({"float32": 4}.get(self.dtype, 2)) if self.weight_format == "dtype" else 1

    @property
    def weight_parts(self) -> tuple[WeightPart, ...]:
        """Return what an engine gets, in order, once `lora_sync` is settled: the base once, the rest every sync."""
        return ("base", "adapter") if self.lora_sync == "adapter" else ("merged",)

    def sampling(self, seed: int) -> SamplingParams:
        """Return the parameters of training samples, with the seed of one group; the trainer scores by the same."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=tuple(self.stop),
            seed=seed,
            whole_logprobs=True,
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig(BudgetSettings):
    """Section `engine`: the trainer."""

    backend: str = setting("torch", "Training engine: torch, or another that is installed.")
    dtype: str = setting(
        AUTO,
        "Number format of the matrix products, whose weights are kept in float32; auto: bfloat16 on an accelerator, "
        "float32 on CPUs.",
        choices=(AUTO, "float32", "bfloat16"),
    )
    num_ranks: int = setting(1, "Processes that train together, each on a device of its own.", "ranks", ge=1, le=65536)
    max_updates: int = setting(0, "End the run after so many updates; 0: when the data ends.", "updates", ge=0)
    max_time_s: float = setting(
        0.0, "End the run after so long, counted from the start or the resume of training; 0: no limit.", "s", ge=0
    )


@dataclass(frozen=True, kw_only=True)
class EvalSetConfig:
    """A table `[eval.sets.NAME]`: one validation set, and how its items are sampled and judged."""

    path: str = setting(REQUIRED, "Where its items are: any form that data.path takes.", hub="dataset")
    split: str = setting("train", "Split to read, where the path holds several.")
    max_prompts: int = setting(0, "Items used; 0: all of a file, 1000 of a generator.", "items", ge=0)
    prompt_column: str = setting("", "Column of the prompt; empty: data.prompt_column.")
    answer_column: str = setting("", "Column of the reference answer; empty: data.answer_column.")
    system_prompt: str = setting("", "Put before conversations that have no system message; empty: data.system_prompt.")
    n: int = setting(1, "Samples of each item.", "samples", ge=1, le=1024)
    k: list[int] = setting([], "The k of pass@k and maj@k, such as [1, 8]; empty: n.", "samples", ge=1)
    temperature: float = setting(0.0, "Of the sampled distribution; 0 is greedy.", ge=0)
    top_p: float = setting(1.0, "Sample from the smallest set of tokens with this much probability.", gt=0, le=1)
    top_k: int = setting(0, "Sample from the k likeliest tokens; 0 from all.", "tokens", ge=0)
    min_p: float = setting(0.0, "Leave out tokens less likely than this share of the likeliest.", ge=0, lt=1)
    max_tokens: int = setting(
        0,
        "Longest completion; with an environment or an agent, the longest turn; 0: rollout.max_tokens.",
        "tokens",
        ge=0,
        le=2**30,
    )
    success_reward: float = setting(0.99, "A completion with at least this reward counts as right.")
    environment: EnvironmentConfig | None = setting(
        None, "An environment of its own, with the keys of section environment; none: that one."
    )
    reward: RewardConfig | None = setting(None, "A reward of its own, with the keys of section reward; none: that one.")

    def __post_init__(self) -> None:
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(f"n = {self.n} samples at temperature 0 are all the same: set temperature, or n = 1")
        if too_large := [k for k in self.k if k > self.n]:
            raise ConfigError(f"k = {too_large[0]} needs as many samples of an item, and n = {self.n}")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Section `eval`: validation on held-out prompts before, during and after training."""

    every_updates: int | None = setting(
        None,
        "Updates between two validations, besides one before training and one at its end; 0: none at all. Not given: "
        f"{VALIDATED_EVERY} where section data holds prompts out and something judges, else none.",
        "updates",
        ge=0,
    )
    max_prompts: int = setting(0, "Held-out prompts of section data used; 0 uses all.", "prompts", ge=0)
    temperature: float = setting(0.0, "Of their validation samples; 0 is greedy.", ge=0)
    success_reward: float = setting(0.99, "A completion with at least this reward counts as right in the accuracy.")
    sets: dict[str, EvalSetConfig] = setting({}, "More validation sets by names of your own: tables [eval.sets.NAME].")
    score_set: str = setting(
        "", "Set whose mean reward says which checkpoint is the best; empty: the held-out prompts, else the first."
    )
    stop_at_accuracy: float = setting(
        0.0, "End the run once the accuracy of score_set's validation reaches this; 0: never.", ge=0, le=1
    )
    at_sync: str = setting(
        "auto",
        "When weights come while a validation runs: wait holds them, and so the trainer, until it ends, so that one "
        "version answers all; go_on lets later answers be of later versions, and says which; auto: go_on in the "
        "asynchronous modes, wait in others.",
        choices=("auto", "wait", "go_on"),
    )

    def __post_init__(self) -> None:
        if self.stop_at_accuracy and self.every_updates == 0:
            raise ConfigError(
                f"eval.stop_at_accuracy = {self.stop_at_accuracy:g} has no effect without validations: set "
                "eval.every_updates, or leave it out"
            )
        if HELD_OUT in self.sets:
            raise ConfigError(f"eval.sets.{HELD_OUT}: this name is that of the prompts held out by section data")
        if self.score_set and self.score_set not in (*self.sets, HELD_OUT):
            known = ", ".join((HELD_OUT, *self.sets))
            raise ConfigError(f"eval.score_set = {self.score_set!r} is no validation set; there are {known}")


@dataclass(frozen=True, kw_only=True)
class RolesProfileConfig(ProfileConfig):
    """Section `profile`: traces of some updates, and of the engines that sample under their weights."""

    rollout_s: float = setting(
        10.0, "Longest stretch of a rollout engine's trace, from the weights of a traced update on.", "s", gt=0
    )


@dataclass(frozen=True, kw_only=True)
class RolesConfig(ClusterConfig):
    """Section `cluster`: the machines of a run, and how its roles share CPUs and devices."""

    rollout_threads: int = setting(0, "CPU threads of each rollout engine; 0: all CPUs, shared by the engines.", ge=0)
    colocate: bool = setting(False, "Rollout engines use the trainer's devices: they sleep while it trains.")
    sleep_level: int = setting(
        LEAST_THAT_FITS,
        "What colocated roles give back between their turns: 0 nothing, 1 engines their KV cache and the trainer all "
        "its memory, 2 engines their weights too; -1: the least that makes room for each turn by the estimate, of the "
        "trainer's memory too.",
        ge=LEAST_THAT_FITS,
        le=2,
    )
    turn_timeout_s: float = setting(
        120.0, "Longest wait for one colocated role to give its memory back, or to take it again.", "s", gt=0
    )
    spans_nodes: bool = setting(False, "A rollout engine wider than a node may take several nodes, each whole.")


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """All settings of a run of `grpo-async-app`."""

    model: ModelConfig
    data: PromptsConfig
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    async_: AsyncConfig = field(default_factory=AsyncConfig)
    cluster: RolesConfig = field(default_factory=RolesConfig)
    log: LogConfig = field(default_factory=LogConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    profile: RolesProfileConfig = field(default_factory=RolesProfileConfig)

    @property
    def steps_per_update(self) -> int:
        """Optimizer steps of one update: its mini batches, in each pass over them."""
        return self.async_.require_batches * self.algorithm.num_passes

    @property
    def traced_roles(self) -> list[RoleName]:
        trainers = [RoleName("trainer", rank) for rank in range(self.engine.num_ranks)]
        return [*trainers, *(RoleName("rollout", index) for index in range(self.rollout.num_engines))]

    @property
    def devices(self) -> dict[str, str]:
        """Return what each kind of role computes on, by the setting that says so."""
        teacher = {"teacher.device": self.teacher.device} if self.teacher.is_set else {}
        model = reward_model_of(self.reward)
        scoring = {"reward.reward_model.device": model.device} if model else {}
        return {"engine.device": self.engine.device, "rollout.device": self.rollout.device, **teacher, **scoring}

    @property
    def processes(self) -> dict[str, int]:
        """Processes of each kind of role, by the setting that says how many."""
        teacher = {"teacher.num_replicas": self.teacher.num_replicas} if self.teacher.is_set else {}
        model = reward_model_of(self.reward)
        scoring = {"reward.reward_model.num_replicas": model.num_replicas} if model else {}
        engines = {"engine.num_ranks": self.engine.num_ranks, "rollout.num_engines": self.rollout.num_engines}
        return {**engines, **teacher, **scoring}

    @property
    def is_judged(self) -> bool:
        """Tell whether anything says what a sample is worth; an agent may post it."""
        return self.reward.is_set or bool(self.environment.name) or self.agent.is_set

    @property
    def validates_every(self) -> int:
        """Updates between two validations; 0: none. Prompts that are held out are for that, if nothing else is said."""
        if self.eval.every_updates is not None:
            return self.eval.every_updates
        holds_out = bool(self.data.eval_size or self.data.eval_path or self.data.eval_split)
        return VALIDATED_EVERY if holds_out and self.is_judged else 0

    @property
    def validation_goes_on(self) -> bool:
        """Return whether weights come to the engines while a validation runs, without waiting for its end."""
        takes_turns = self.cluster.colocate or self.async_.mode == "on-policy pipeline"
        return self.eval.at_sync == "go_on" or (self.eval.at_sync == "auto" and not takes_turns)

    @property
    def agents_post_rewards(self) -> bool:
        """Return whether an agent may say what its episode was worth."""
        if self.agent.may_post_reward is not None:
            return self.agent.may_post_reward
        return not any(
            each.is_set for each in (self.reward, *(source.reward for source in self.data.mix.values())) if each
        )

    @property
    def has_turns(self) -> bool:
        """Return whether a training sample may have several turns of the model."""
        own = (source.environment for source in self.data.mix.values())
        return self.agent.is_set or any(each.name for each in (self.environment, *own) if each)

    @property
    def is_endless(self) -> bool:
        """Return whether there are always more prompts: a mix or a curriculum draws without end."""
        return bool(self.data.mix) or self.curriculum.is_set or not self.data.epochs

    @property
    def max_response_tokens(self) -> int:
        """Tokens after the prompt at most: of a completion, or of a whole episode."""
        own = [each.environment for each in self.data.mix.values()]
        return max(self.response_tokens(each or self.environment) for each in own or [None])

    def response_tokens(self, environment: EnvironmentConfig) -> int:
        """Return the same, of samples that this environment answers."""
        if self.agent.is_set:  # which writes its prompts itself
            return self.rollout.max_model_len - self.data.max_prompt_tokens
        return environment.max_tokens if environment.name else self.rollout.max_tokens

    @property
    def is_exact(self) -> bool:
        """Return whether trainer and engines find the same log-probabilities, to the bit, under equal weights."""
        return self.engine.options.get("numerics") == "exact"

    def rollout_engine(self, model_path: str, num_threads: int) -> RolloutEngineConfig:
        shared = _shared(self.rollout, RolloutEngineSettings)
        if self.is_exact:
            shared["options"] = {**self.rollout.options, "numerics": "exact"}
        return RolloutEngineConfig(
            **shared,
            num_threads=num_threads,
            model_path=model_path,
            trust_remote_code=self.model.trust_remote_code,
            shares_device=self.cluster.colocate,
            return_routes=self.rollout.replay_routes != "off",
        )

    def teacher_engine(self, num_threads: int) -> RolloutEngineConfig:
        return self.teacher.engine(
            self.rollout.max_model_len,
            self.rollout.samples_per_prompt,
            num_threads,
            trust=self.model.trust_remote_code,
        )

    def train_engine(self, model_path: str, num_updates: int, num_threads: int = 0) -> TrainEngineConfig:
        """Return what the training backend is given: scores at the sampler's temperature.

        `num_updates` of the whole run are for the learning rate's schedule; each takes `steps_per_update` steps, but
        for those in which the critic learns alone.
        """
        shared = _shared(self.engine, TrainEngineSettings)
        options = {**self.engine.options, "temperature": self.rollout.temperature}
        if self.algorithm.needs_entropy_gradient:
            options["entropy_gradient"] = True
        if self.rollout.replay_routes == "measure":
            options["replay_routes"] = False
        return TrainEngineConfig(
            **{**shared, "options": options},
            num_threads=num_threads,
            model_path=model_path,
            trust_remote_code=self.model.trust_remote_code,
            total_steps=max(num_updates - self.critic.warmup_updates, 0) * self.steps_per_update,
        )

    def critic_engine(self, model_path: str, num_updates: int, num_threads: int = 0) -> TrainEngineConfig:
        """Return what the training backend is given for the critic; `model_path` is the policy's."""
        own = {"learning_rate": self.critic.learning_rate, "options": self.critic.options}
        return TrainEngineConfig(
            **{**_shared(self.engine, TrainEngineSettings), **own},
            head="score",
            num_threads=num_threads,
            model_path=self.critic.path or model_path,
            trust_remote_code=self.model.trust_remote_code,
            total_steps=num_updates * self.steps_per_update,
        )


def _shared(section: object, settings: type) -> dict[str, Any]:
    return {each.name: getattr(section, each.name) for each in fields(settings)}
