"""`--shrink`: a run of the same structure with every size shrunk, on a CPU, in a minute, with nothing to download.

What stays: roles, ranks and engines up to two, colocation, groups, the asynchronous parameters, advantage, loss,
correction. What goes: the model, the data and the reward, lengths, batches, devices, engines that are not installed.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Final

from grpo_async_app._config.agent import AgentConfig
from grpo_async_app._config.mix import PromptsConfig
from grpo_async_app._config.sections import GrpoConfig, RolesConfig, RolloutConfig, TeacherConfig
from grpo_async_app._preflight.backends import embed_open_backends
from grpo_async_app._preflight.preflight import Preflight, check_run
from grpo_async_app._shrink_reward import REWARD
from offbeat_async_policy import AsyncConfig
from offbeat_data import EnvironmentConfig, RewardConfig
from offbeat_objectives import AlgorithmConfig
from offbeat_recipes import (
    EMBEDDED,
    MAX_IMAGE_TOKENS,
    MAX_ROLES,
    NUM_DRAWN,
    SEEING,
    draw_figures,
    installed_backend,
    make_tiny_model,
    shrink_engine,
    stand_ins,
    takes_experts,
    takes_images,
    tiny_family,
)
from offbeat_weightsync import Endpoint, Route, transport_class

_SAMPLES: Final = 4
_PROMPT_TOKENS: Final = 8
_COMPLETION_TOKENS: Final = 12
_EPISODE_TOKENS: Final = 48
_OWN_PROMPTS: Final = frozenset({"openenv", "reasoning_gym", "verifiers"})
"""Environments that judge none but prompts of their own."""
FIGURES: Final = Path("figures", "figures.jsonl")
"""Image and rows of a model that sees, in its folder."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A run made small.

    Args:
        family: of the model to make at its `model.path`.
        notices: what is not as in the recipe, beyond sizes.
    """

    config: GrpoConfig
    family: str
    notices: tuple[str, ...]

    def prepare(self) -> Preflight:
        """Make the model, draw what it looks at, and check the run as any other."""
        config = self.config
        folders = [config.model.path, *([config.teacher.path] if config.teacher.is_set else [])]
        for number, folder in enumerate(folders):  # a teacher of other weights, or there is nothing to learn from it
            seed = config.engine.seed + number
            make_tiny_model(Path(folder), self.family, max_positions=config.rollout.max_model_len, seed=seed)
        if self.family in SEEING:
            columns = {"prompt_column": config.data.prompt_column, "answer_column": config.data.answer_column}
            draw_figures(Path(config.data.path), **columns, seed=config.data.seed)
        preflight = check_run(config)
        return replace(preflight, notices=(*self.notices, *preflight.notices))


def shrink_run(config: GrpoConfig, model_folder: Path) -> Rehearsal:
    """Shrink a run for a tiny model that will be made in `model_folder`."""
    config = embed_open_backends(config)  # as "auto" does on CPUs
    backend = installed_backend("offbeat.engine", config.engine.backend)
    sampler = installed_backend("offbeat.rollout", config.rollout.backend)
    engine = shrink_engine(
        config.engine,
        wanted=config.engine.backend,
        taken=backend,
        num_ranks=min(config.engine.num_ranks, MAX_ROLES),
        num_updates=max(2, config.async_.trigger_parameter_sync_step + 1),  # a sync comes between two of them
    )
    family, family_notice = tiny_family(
        config.model.path,
        has_experts=sampler != EMBEDDED and takes_experts(engine, backend),
        can_see=takes_images(engine, backend),
    )
    environment = _shrink_environment(config.environment)
    data = _drawn_data(config, model_folder / FIGURES if family in SEEING else None)
    rollout = _shrink_rollout(config.rollout, sampler, environment, data.max_prompt_tokens)
    small = replace(
        config,
        model=replace(config.model, path=str(model_folder)),
        data=data,
        reward=RewardConfig(name=REWARD),
        environment=environment,
        agent=AgentConfig(),
        rollout=rollout,
        teacher=_shrink_teacher(config.teacher, model_folder.with_name("teacher")),
        engine=engine,
        algorithm=_shrink_algorithm(
            config.algorithm, rollout.max_model_len - data.max_prompt_tokens, rollout.samples_per_prompt
        ),
        async_=_shrink_async(config.async_, rollout.samples_per_prompt, engine.num_ranks),
        cluster=_shrink_cluster(config.cluster),
        log=replace(config.log, trackers=()),
        checkpoint=replace(config.checkpoint, every=min(config.checkpoint.every, 2)),
        eval=replace(config.eval, every_updates=min(config.validates_every, 2), max_prompts=0, sets={}, score_set=""),
        profile=replace(config.profile, steps=""),
    )
    notices = [family_notice, *_replacements(config, small)]
    return Rehearsal(config=small, family=family, notices=tuple(f"shrunk: {it}" for it in notices if it))


def _replacements(config: GrpoConfig, small: GrpoConfig) -> list[str]:
    """Return what has another in its place, with the reason."""
    found = stand_ins(
        {
            "engine.backend": (config.engine.backend, small.engine.backend),
            "rollout.backend": (config.rollout.backend, small.rollout.backend),
            "teacher.backend": (config.teacher.backend, small.teacher.backend),
        }
    )
    if config.cluster.launcher != small.cluster.launcher:
        found.append(f"cluster.launcher: {small.cluster.launcher} instead of {config.cluster.launcher}")
    if config.data.mix:
        found.append("data.mix: left out, with what its sources have of their own")
    if config.eval.sets:
        found.append("eval.sets: left out, and the prompts held out of what is drawn are validated instead")
    if config.environment.name != small.environment.name:
        found.append(f"environment: {config.environment.name} judges prompts of its own only, and is left out")
    if config.agent.is_set:
        found.append("agent: it acts on what a real model says, and is left out")
    return found


def _shrink_environment(environment: EnvironmentConfig) -> EnvironmentConfig:
    if not environment.name or environment.name in _OWN_PROMPTS:
        return EnvironmentConfig()
    return replace(environment, max_tokens=min(environment.max_tokens, _EPISODE_TOKENS))


def _drawn_data(config: GrpoConfig, figures: Path | None) -> PromptsConfig:
    """Sums, which an episode's are asked like and may be of anything; or figures, in the columns of the recipe."""
    eval_size = 4 if config.validates_every else 0
    if figures is not None:
        return replace(
            config.data,
            mix={},
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
    return PromptsConfig(
        path="arithmetic:2",
        num_items=NUM_DRAWN,
        seed=config.data.seed,
        eval_size=eval_size,
        max_prompt_tokens=_PROMPT_TOKENS,
        shuffle=config.data.shuffle,
        epochs=0,
    )


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
        num_engines=min(rollout.num_engines, MAX_ROLES),
        tensor_parallel=1 if backend == EMBEDDED else min(rollout.tensor_parallel, MAX_ROLES),
        samples_per_prompt=min(rollout.samples_per_prompt, _SAMPLES),
        max_tokens=max_tokens,
        max_model_len=longest,
        max_running=min(rollout.max_running or 16, 16),
        sync_bucket_bytes=min(rollout.sync_bucket_bytes, 2**16),  # so that weights take several buckets here too
        serve_port=rollout.serve_port and 0,
        lora_sync=rollout.lora_sync if backend == rollout.backend else "auto",
        weight_transport=_transport_on_cpus(rollout.weight_transport),
        weight_folder="",
        options=own if backend == rollout.backend else {},
    )


def _transport_on_cpus(name: str) -> str:
    """Return the transport itself, or "auto" for one that needs other devices."""
    cpu = Endpoint(node="", device="cpu")
    return "auto" if transport_class(name).complaint(Route(senders=[cpu], receivers=[cpu])) else name


def _shrink_teacher(teacher: TeacherConfig, folder: Path) -> TeacherConfig:
    if not teacher.is_set:
        return teacher
    backend = installed_backend("offbeat.rollout", teacher.backend)
    return replace(
        teacher,
        path=str(folder),
        backend=backend,
        num_replicas=min(teacher.num_replicas, MAX_ROLES),
        device="cpu",
        tensor_parallel=1 if backend == EMBEDDED else min(teacher.tensor_parallel, MAX_ROLES),
        options=teacher.options if backend == teacher.backend else {},
    )


def _shrink_algorithm(algorithm: AlgorithmConfig, longest: int, samples_per_prompt: int) -> AlgorithmConfig:
    options = dict(algorithm.options)
    if algorithm.advantage == "pass_at_k":
        options["k"] = min(options.get("k", samples_per_prompt), samples_per_prompt)
    return replace(
        algorithm,
        options=options,
        fixed_length=algorithm.fixed_length and min(algorithm.fixed_length, longest),
        overlong_buffer_tokens=min(algorithm.overlong_buffer_tokens, longest // 2),
    )


def _shrink_async(policy: AsyncConfig, samples_per_prompt: int, num_ranks: int) -> AsyncConfig:
    """Return all but the mini-batch, and that not below where the staleness would admit less than one prompt more."""
    staleness = Fraction(repr(float(policy.staleness_threshold)))
    per_group = policy.require_batches * policy.trigger_parameter_sync_step
    smallest = max(2, ceil(1 / (staleness * per_group)) if staleness else 0)
    while smallest * samples_per_prompt % num_ranks:
        smallest += 1
    size = min(policy.mini_batch_size, smallest)
    return replace(policy, mini_batch_size=size, max_in_flight=min(policy.max_in_flight, 2 * size))


def _shrink_cluster(cluster: RolesConfig) -> RolesConfig:
    """On this machine, without Ray; whether the roles take turns stays."""
    return RolesConfig(
        colocate=cluster.colocate,
        sleep_level=cluster.sleep_level,
        max_restarts=cluster.max_restarts,
        trainer_threads=1,
        rollout_threads=1,
    )
