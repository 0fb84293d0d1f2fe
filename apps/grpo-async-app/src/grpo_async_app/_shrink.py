"""`--shrink`: a run of the same structure with every size shrunk, on a CPU, in a minute, with nothing to download.

What stays: roles, ranks and engines up to two, colocation, groups, the asynchronous parameters, advantage, loss,
correction. What goes: the model, the data and the reward, lengths, batches, devices, engines that are not installed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any, Final

from grpo_async_app._config import EngineConfig, GrpoConfig, RolloutConfig
from grpo_async_app._preflight import Preflight, check_run
from grpo_async_app._shrink_model import make_tiny_model, tiny_family
from grpo_async_app._shrink_reward import REWARD
from grpo_async_app._shrink_vision import MAX_IMAGE_TOKENS, SEEING, draw_figures
from grpo_async_app._teacher_config import TeacherConfig
from offbeat_async_policy import AsyncConfig
from offbeat_cluster import ClusterConfig
from offbeat_data import DataConfig, EnvironmentConfig, RewardConfig
from offbeat_objectives import AlgorithmConfig
from offbeat_types import BackendError, load_backend

REHEARSAL_BYTES: Final = 2**28
_MAX_ROLES: Final = 2
"""Ranks, engines, and ranks of one engine: with two, whatever waits for another does."""
_SAMPLES: Final = 4
_PROMPT_TOKENS: Final = 8
_NUM_ITEMS: Final = 512
_COMPLETION_TOKENS: Final = 12
_EPISODE_TOKENS: Final = 48
_EMBEDDED: Final = "torch"
_OWN_PROMPTS: Final = frozenset({"reasoning_gym", "verifiers"})
"""Environments that judge none but prompts of their own."""
FIGURES: Final = Path("figures", "figures.jsonl")
"""Of a model that sees, in its folder."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A run made small.

    Args:
        config: of the small run.
        family: of the model to make at its `model.path`.
        notices: what is not as in the recipe, beyond sizes.
    """

    config: GrpoConfig
    family: str
    notices: tuple[str, ...]

    def prepare(self) -> Preflight:
        """Make the model, draw what it looks at, and check the run as any other.

        Raises:
            UserError: something is wrong with the recipe that does not depend on its sizes.
        """
        config = self.config
        folders = [config.model.path, *([config.teacher.path] if config.teacher.is_set else [])]
        for number, folder in enumerate(folders):  # a teacher of other weights, or there is nothing to learn from it
            seed = config.engine.seed + number
            make_tiny_model(Path(folder), self.family, max_positions=config.rollout.max_model_len, seed=seed)
        if self.family in SEEING:
            draw_figures(config.data, _NUM_ITEMS)
        preflight = check_run(config)
        return replace(preflight, notices=(*self.notices, *preflight.notices))


def shrink_run(config: GrpoConfig, model_folder: Path) -> Rehearsal:
    """Shrink a run. Pure but for the questions which backends are installed, and which family the model is of.

    Args:
        config: of the recipe.
        model_folder: where the tiny model will be made.
    """
    backend = _installed("offbeat.engine", config.engine.backend)
    sampler = _installed("offbeat.rollout", config.rollout.backend)
    engine = _shrink_engine(config.engine, backend, config.async_.trigger_parameter_sync_step)
    can_see = backend == _EMBEDDED and engine.options.get("tensor_parallel", 1) == 1
    family, family_notice = tiny_family(config.model.path, is_embedded=sampler == _EMBEDDED, can_see=can_see)
    environment = _shrink_environment(config.environment)
    data = _drawn_data(config, model_folder / FIGURES if family in SEEING else None)
    rollout = _shrink_rollout(config.rollout, sampler, environment, data.max_prompt_tokens)
    small = replace(
        config,
        model=replace(config.model, path=str(model_folder)),
        data=data,
        reward=RewardConfig(name=REWARD),
        environment=environment,
        rollout=rollout,
        teacher=_shrink_teacher(config.teacher, model_folder.with_name("teacher")),
        engine=engine,
        algorithm=_shrink_algorithm(config.algorithm, rollout.max_model_len - data.max_prompt_tokens),
        async_=_shrink_async(config.async_, rollout.samples_per_prompt, engine.num_ranks),
        cluster=_shrink_cluster(config.cluster),
        log=replace(config.log, trackers=()),
        checkpoint=replace(config.checkpoint, every=min(config.checkpoint.every, 2)),
        eval=replace(config.eval, every_updates=min(config.eval.every_updates, 2), max_prompts=0),
    )
    notices = [family_notice, *_replacements(config, small)]
    return Rehearsal(config=small, family=family, notices=tuple(f"shrunk: {it}" for it in notices if it))


def _installed(kind: str, name: str) -> str:
    """The backend, or the embedded one where it, or the engine that it adapts, is not here."""
    try:
        getattr(load_backend(kind, name), "check_installed", lambda: None)()
    except BackendError:
        return _EMBEDDED
    return name


def _replacements(config: GrpoConfig, small: GrpoConfig) -> list[str]:
    """What has another in its place, with the reason."""
    found = [
        f"{key}: {wanted} is not installed, {taken} takes its place"
        for key, wanted, taken in (
            ("engine.backend", config.engine.backend, small.engine.backend),
            ("rollout.backend", config.rollout.backend, small.rollout.backend),
            ("teacher.backend", config.teacher.backend, small.teacher.backend),
        )
        if wanted != taken
    ]
    if config.cluster.launcher != small.cluster.launcher:
        found.append(f"cluster.launcher: {small.cluster.launcher} instead of {config.cluster.launcher}")
    if config.environment.name != small.environment.name:
        found.append(f"environment: {config.environment.name} judges prompts of its own only, and is left out")
    return found


def _shrink_environment(environment: EnvironmentConfig) -> EnvironmentConfig:
    if not environment.name or environment.name in _OWN_PROMPTS:
        return EnvironmentConfig()
    return replace(environment, max_tokens=min(environment.max_tokens, _EPISODE_TOKENS))


def _drawn_data(config: GrpoConfig, figures: Path | None) -> DataConfig:
    """Sums, which an episode's are asked like and may be of anything; or figures, in the columns of the recipe."""
    eval_size = 4 if config.eval.every_updates else 0
    if figures is not None:
        return replace(
            config.data,
            path=str(figures),
            split="train",
            num_items=0,
            eval_path="",
            eval_split="",
            eval_size=eval_size,
            system_prompt="",
            template_options={},
            max_prompt_tokens=_PROMPT_TOKENS + MAX_IMAGE_TOKENS,
            epochs=0,
        )
    return DataConfig(
        path="arithmetic:2",
        num_items=_NUM_ITEMS,
        seed=config.data.seed,
        eval_size=eval_size,
        max_prompt_tokens=_PROMPT_TOKENS,
        shuffle=config.data.shuffle,
        epochs=0,
    )


def _shrink_engine(engine: EngineConfig, backend: str, updates_per_sync: int) -> EngineConfig:
    """The trainer, for as many updates as it takes for a sync to come between two of them."""
    num_ranks = min(engine.num_ranks, _MAX_ROLES)
    options = engine.options if backend == engine.backend else _shared_options(engine.options)
    return replace(
        engine,
        backend=backend,
        device="cpu",
        num_ranks=num_ranks,
        max_updates=max(2, updates_per_sync + 1),
        warmup_steps=min(engine.warmup_steps, 1),
        max_tokens_per_microbatch=min(engine.max_tokens_per_microbatch, 64),
        lora_rank=min(engine.lora_rank, 4),
        options=_shrink_axes(options, num_ranks),
    )


def _shared_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that mean the same to every training engine."""
    return {name: value for name, value in options.items() if name == "tensor_parallel"}


def _shrink_axes(options: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """The first axis along which ranks share the model keeps as many as there are; the others get what is left."""
    shrunk, left = dict(options), num_ranks
    for axis in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
        if axis in shrunk:
            shrunk[axis] = min(shrunk[axis], left)
            left //= shrunk[axis]
    if "expert_parallel" in shrunk:
        shrunk["expert_parallel"] = min(shrunk["expert_parallel"], num_ranks // shrunk.get("pipeline_parallel", 1))
    for sizes in ("virtual_pipeline", "mtp_layers"):
        if sizes in shrunk:
            shrunk[sizes] = min(shrunk[sizes], 1)
    return shrunk


def _shrink_rollout(
    rollout: RolloutConfig, backend: str, environment: EnvironmentConfig, prompt_tokens: int
) -> RolloutConfig:
    max_tokens = min(rollout.max_tokens, _COMPLETION_TOKENS)
    longest = prompt_tokens + (environment.max_tokens if environment.name else max_tokens)
    own = {name: value for name, value in rollout.options.items() if name != "kv_cache_tokens"}
    return replace(
        rollout,
        backend=backend,
        device="cpu",
        num_engines=min(rollout.num_engines, _MAX_ROLES),
        tensor_parallel=1 if backend == _EMBEDDED else min(rollout.tensor_parallel, _MAX_ROLES),
        samples_per_prompt=min(rollout.samples_per_prompt, _SAMPLES),
        max_tokens=max_tokens,
        max_model_len=longest,
        max_running=min(rollout.max_running, 16),
        sync_bucket_bytes=min(rollout.sync_bucket_bytes, 2**16),  # so that weights take several buckets here too
        serve_port=rollout.serve_port and 0,
        options=own if backend == rollout.backend else {},
    )


def _shrink_teacher(teacher: TeacherConfig, folder: Path) -> TeacherConfig:
    if not teacher.is_set:
        return teacher
    backend = _installed("offbeat.rollout", teacher.backend)
    return replace(
        teacher,
        path=str(folder),
        backend=backend,
        num_replicas=min(teacher.num_replicas, _MAX_ROLES),
        device="cpu",
        tensor_parallel=1 if backend == _EMBEDDED else min(teacher.tensor_parallel, _MAX_ROLES),
        options=teacher.options if backend == teacher.backend else {},
    )


def _shrink_algorithm(algorithm: AlgorithmConfig, longest: int) -> AlgorithmConfig:
    return replace(
        algorithm,
        fixed_length=algorithm.fixed_length and min(algorithm.fixed_length, longest),
        overlong_buffer_tokens=min(algorithm.overlong_buffer_tokens, longest // 2),
    )


def _shrink_async(policy: AsyncConfig, samples_per_prompt: int, num_ranks: int) -> AsyncConfig:
    """All but the mini-batch, and that not below where the staleness would admit less than one prompt more."""
    staleness = Fraction(repr(float(policy.staleness_threshold)))
    per_group = policy.require_batches * policy.trigger_parameter_sync_step
    smallest = max(2, ceil(1 / (staleness * per_group)) if staleness else 0)
    while smallest * samples_per_prompt % num_ranks:
        smallest += 1
    size = min(policy.mini_batch_size, smallest)
    return replace(policy, mini_batch_size=size, max_in_flight=min(policy.max_in_flight, 2 * size))


def _shrink_cluster(cluster: ClusterConfig) -> ClusterConfig:
    """On this machine, without Ray; whether the roles take turns stays."""
    return ClusterConfig(
        colocate=cluster.colocate,
        sleep_level=cluster.sleep_level,
        max_restarts=cluster.max_restarts,
        trainer_threads=1,
        rollout_threads=1,
    )
