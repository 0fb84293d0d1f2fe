"""The arithmetic of batches: what one optimizer step, one update and one sync are made of."""

from contextlib import suppress
from dataclasses import replace
from typing import Final

from grpo_async_app._config.reward_model import RewardModelOptions, reward_model_of
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.engines import held_bytes
from grpo_async_app._preflight.placement import trainer_width
from offbeat_core import (
    CacheBudget,
    CacheNeeds,
    ModelError,
    RolloutEngineSettings,
    TrainLayout,
    installed_backends,
    load_backend,
)
from offbeat_placement import (
    NUMBER_BYTES,
    ClassifierMemory,
    MemoryEstimate,
    ModelShape,
    Placement,
    RolloutMemory,
    read_shape,
    train_advice,
    train_memory,
)
from offbeat_recipes import RunMemory


class BatchArithmetic:
    """Numbers of one optimizer step, one update (R groups) and one sync (after K updates), from the configuration.

    Args:
        config: of the run, with its token budget settled.
        layout: how the trainer's ranks share the model; None where its backend cannot be asked: all data parallel.
        longest_prompt: tokens of the longest training prompt; None where the data are not read: the limit.
    """

    def __init__(
        self, config: GrpoConfig, layout: TrainLayout | None = None, longest_prompt: int | None = None
    ) -> None:
        policy, rollout = config.async_, config.rollout
        self.groups_per_step = policy.mini_batch_size
        self.batches_per_update, self.num_passes = policy.require_batches, config.algorithm.num_passes
        self.steps_per_update = config.steps_per_update
        self.updates_per_sync = policy.trigger_parameter_sync_step
        self.samples_per_group = rollout.samples_per_prompt
        self.max_admitted = policy.max_admitted
        self.num_ranks = layout.dp if layout else config.engine.num_ranks
        self.tokens_per_sample = _longest_sample(config, longest_prompt)
        self.tokens_per_microbatch = config.engine.max_tokens_per_microbatch
        self.samples_at_once = rollout.num_engines * rollout.max_running
        self.groups_per_update = self.groups_per_step * self.batches_per_update
        self.samples_per_step = self.groups_per_step * self.samples_per_group
        self.samples_per_update = self.groups_per_update * self.samples_per_group
        # Passes of one rank in one step, when every sample is as long as it may be.
        of_a_pass = self.num_ranks * self.tokens_per_microbatch
        self.microbatches_per_rank = -(-self.samples_per_step * self.tokens_per_sample // of_a_pass)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one rank in one step, when every sample is as long as it may be."""
        return -(-self.samples_per_step // self.num_ranks) * self.tokens_per_sample

    def as_data(self) -> dict[str, int]:
        return dict(vars(self))

    def rows(self) -> list[tuple[str, str]]:
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}"
        samples = self.max_admitted * self.samples_per_group
        passes = f" in each of {self.num_passes} passes: {self.steps_per_update} steps" * (self.num_passes > 1)
        return [
            (
                "optimizer step",
                f"{self.groups_per_step} prompts x {self.samples_per_group} samples = {self.samples_per_step} samples, "
                f"{self.samples_per_step / self.num_ranks:g} on each of {ranks}; at most {self.microbatches_per_rank} "
                f"micro-batch{'es' * (self.microbatches_per_rank > 1)} of up to {self.tokens_per_microbatch} tokens a "
                "rank",
            ),
            (
                "update",
                f"R = {self.batches_per_update} steps x {self.groups_per_step} = {self.groups_per_update} prompts, "
                f"{self.samples_per_update} samples{passes}; sync after K = {self.updates_per_sync}",
            ),
            (
                "in flight",
                f"at most {self.max_admitted} prompts ({samples} samples) started between two syncs; the engines "
                f"have room to decode {self.samples_at_once} samples at a time",
            ),
        ]

    def notices(self) -> list[str]:
        """Return what works and is probably not meant."""
        found = []
        if self.samples_per_step % self.num_ranks:
            found.append(
                f"{self.samples_per_step} samples of a step do not divide among {self.num_ranks} trainer ranks: some "
                "wait for others; choose async.mini_batch_size so that they do"
            )
        if self.tokens_per_sample > self.tokens_per_microbatch:
            found.append(
                f"a sample may have {self.tokens_per_sample} tokens, more than engine.max_tokens_per_microbatch = "
                f"{self.tokens_per_microbatch}: the longest need a pass larger than that"
            )
        return found


def _longest_sample(config: GrpoConfig, longest_prompt: int | None) -> int:
    """Tokens of a sample at most. An agent writes its own prompts, so that the data say nothing of them."""
    prompt = config.data.max_prompt_tokens
    if longest_prompt is not None and not config.agent.is_set:
        prompt = min(longest_prompt, prompt)
    return prompt + config.max_response_tokens


_CACHE_ADVICE: Final = "a larger {0}.tensor_parallel, or fewer {0}.max_running"


def estimate_memory(
    config: GrpoConfig,
    layout: TrainLayout | None = None,
    placement: Placement | None = None,
    longest_prompt: int | None = None,
) -> RunMemory:
    """Estimate from the model's config.json; raises ModelError where it is not there, or of a family that is not known.

    What memory depends on is settled in `config`. `layout` is None where the trainer's backend cannot be asked: as FSDP
    shards. With `placement`, engines that take a share of their device are asked for their cache. With
    `longest_prompt`, in tokens, a micro-batch is taken to be no larger than the samples of one optimizer step can make
    it.
    """
    shape, width = read_shape(config.model.path), trainer_width(config)
    layout = layout or TrainLayout(dp=config.engine.num_ranks // width, tp=width, zero_stage=3)
    on_cpu = placement.is_on_cpu("trainer") if placement else config.engine.device == "cpu"
    keeps_reference = config.algorithm.needs_reference
    engine = replace(config.engine, max_tokens_per_microbatch=_largest_microbatch(config, layout, longest_prompt))
    trainer = train_memory(engine, layout, shape, on_cpu=on_cpu, keeps_reference=keeps_reference)
    roles, limits = {"trainer": trainer.estimate(shape)}, {"trainer": 0}
    if config.algorithm.needs_critic:
        roles["trainer"] = _with_critic(roles["trainer"], config, on_cpu=on_cpu)
    advice = {"trainer": train_advice(config.engine, roles["trainer"])}
    engines: dict[str, tuple[str, RolloutEngineSettings, ModelShape, int]]
    engines = {"rollout": (config.rollout.backend, config.rollout, shape, 2 * config.rollout.sync_bucket_bytes)}
    if config.teacher.is_set:
        teacher = config.teacher_engine(0)
        engines["teacher"] = (config.teacher.backend, teacher, read_shape(config.teacher.path), 0)
    for role, (backend, settings, of, sync_bytes) in engines.items():
        device_bytes = placement.accelerator_bytes(role) if placement else 0
        takes_turns = role == "rollout" and config.cluster.colocate
        roles[role], budget = _estimate_engine(
            backend, settings, of, sync_bytes, device_bytes, shares_device=takes_turns
        )
        advice[role] = ((budget and budget.advice) or _CACHE_ADVICE).format(role)
        limits[role] = budget.limit_bytes if budget else 0
    if (reward_model := reward_model_of(config.reward)) is not None:
        with suppress(ModelError):  # of a family without an estimate, which many classifiers are
            roles["reward_model"] = _estimate_reward_model(reward_model)
            advice["reward_model"] = "a smaller reward.reward_model.max_batch or max_tokens, or dtype bfloat16"
    return RunMemory(shape, roles, advice, limits)


def estimate_if_known(
    config: GrpoConfig, layout: TrainLayout | None, placement: Placement, longest_prompt: int | None = None
) -> RunMemory | None:
    """Return what `estimate_memory` does, or None: a model without an estimate can be trained all the same."""
    try:
        return estimate_memory(config, layout, placement, longest_prompt)
    except ModelError:
        return None


def copied_bytes(config: GrpoConfig, layout: TrainLayout) -> int:
    """Return what copies of ranks' states take on each of them, at most; 0 for a family without an estimate."""
    if not layout.copied_bytes:
        return 0
    with suppress(ModelError):
        shape = read_shape(config.model.path)
        return train_memory(config.engine, layout, shape, on_cpu=True).estimate(shape).parts["copies"]
    return 0


def _largest_microbatch(config: GrpoConfig, layout: TrainLayout, longest_prompt: int | None) -> int:
    """Tokens of a micro-batch on one rank at most: few short samples do not fill the limit."""
    limit = config.engine.max_tokens_per_microbatch
    if longest_prompt is None:
        return limit
    return min(limit, BatchArithmetic(config, layout, longest_prompt).tokens_per_step)


def _estimate_reward_model(options: RewardModelOptions) -> MemoryEstimate:
    """Return the memory of one replica when each text of a batch is as long as it may be."""
    tokens = options.max_batch * options.max_tokens
    memory = ClassifierMemory(weight_bytes=NUMBER_BYTES[options.dtype], tokens=tokens)
    return memory.estimate(read_shape(options.path, has_head=False))


def _with_critic(policy: MemoryEstimate, config: GrpoConfig, *, on_cpu: bool) -> MemoryEstimate:
    """Return the trainer's memory with what its critic holds all the time; its passes come after those of the policy.

    The critic is sharded over all ranks, however these share the policy.
    """
    shape = read_shape(config.critic.path or config.model.path)
    layout = TrainLayout(dp=config.engine.num_ranks, zero_stage=3)
    critic = train_memory(config.engine, layout, shape, on_cpu=on_cpu).estimate(shape)
    held = sum(critic.parts.get(name, 0) for name in ("weights", "gradients", "optimizer"))
    return MemoryEstimate({**policy.parts, "critic": held})


def _estimate_engine(
    backend: str,
    settings: RolloutEngineSettings,
    shape: ModelShape,
    sync_bytes: int,
    device_bytes: int,
    *,
    shares_device: bool,
) -> tuple[MemoryEstimate, CacheBudget | None]:
    """Estimate one rank of an engine, with what its backend says of its cache, where it can be asked."""
    number_bytes = NUMBER_BYTES[settings.dtype]
    held = held_bytes(backend, settings)
    memory = RolloutMemory(
        weight_bytes=number_bytes,
        matrix_bytes=held.matrices or number_bytes,
        kv_bytes=held.cache or number_bytes,
        state_bytes=held.state or 0,
        states_per_sample=held.states_per_sample,
        tensor_parallel=settings.tensor_parallel,
        max_running=settings.max_running,
        max_model_len=settings.max_model_len,
        sync_bytes=sync_bytes,
    )
    notify = None
    if backend in installed_backends("offbeat.rollout"):
        notify = getattr(load_backend("offbeat.rollout", backend), "cache_budget", None)
    if notify is None:
        return memory.estimate(shape), None
    needs = CacheNeeds(
        device_bytes=device_bytes,
        weight_bytes=memory.held_weights(shape) + sync_bytes,
        token_bytes=memory.kv_bytes_per_token(shape),
        state_bytes=memory.state_bytes_per_sample(shape),
        shares_device=shares_device,
    )
    budget: CacheBudget = notify(settings, needs)
    return replace(memory, cache_bytes=budget.cache_bytes).estimate(shape), budget
