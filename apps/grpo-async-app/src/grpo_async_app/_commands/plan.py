"""The plan of a run: here, on another cluster, and in rehearsal. Starts nothing."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from grpo_async_app._commands.shrink import shrink_run
from grpo_async_app._config.resolved import ResolvedRun, resolve
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._config.weight_sync import choose_transport
from grpo_async_app._fleet.role_specs import plan_threads
from grpo_async_app._preflight.backends import choose_backends
from grpo_async_app._preflight.budget import assume_budget, settle_budget
from grpo_async_app._preflight.correction import choose_correction, route_bytes
from grpo_async_app._preflight.estimates import BatchArithmetic, copied_bytes, estimate_if_known, estimate_memory
from grpo_async_app._preflight.placement import find_view, place_run, request_resources
from grpo_async_app._preflight.platform import choose_for_platform
from grpo_async_app._preflight.preflight import Preflight, check_run
from grpo_async_app._preflight.settings import check_settings, find_problems
from grpo_async_app._preflight.sources import check_rewards
from grpo_async_app._preflight.turns import choose_parking, with_parked
from offbeat_core import BackendError, TrainLayout, as_written
from offbeat_placement import ClusterView, ResourceRequest, SettingValue, available_cpus
from offbeat_recipes import Planner, RunPlan, layout_elsewhere, layout_row, plan_unseen, sample_row
from offbeat_run import count_text, size_text, tracker_notices

_IN_TURNS: Final[Mapping[str, SettingValue]] = {
    "async.staleness_threshold": 0,
    "async.trigger_parameter_sync_step": 1,
    "async.partial_rollout": False,
}
"""Loops that cluster.colocate admits: roles that take turns train synchronously."""
_AS_HERE: Final = "; chosen by what is installed on this machine"
"""Follows the choice of an engine in a plan for other machines."""


class GrpoPlanner(Planner[GrpoConfig]):
    """Trainer, rollout engines and what belongs to them, in their places."""

    config_type: ClassVar = GrpoConfig

    def find_problems(self, sections: Mapping[str, Any], failed: Collection[str]) -> Sequence[str]:
        return find_problems(sections, failed)

    def plan_here(self, config: GrpoConfig) -> RunPlan:
        return _run_plan(check_run(config))

    def plan_elsewhere(self, config: GrpoConfig, view: ClusterView) -> RunPlan:
        """Settings, places, batches, and memory where the model's config.json is here."""
        sampling, training = view.kind(config.rollout.device), view.kind(config.engine.device)
        kinds = {"rollout": sampling, "teacher": view.kind(config.teacher.device)}
        config, engines = choose_backends(config, kinds, is_here=False)
        config, choices = choose_for_platform(config, sampling, training)
        config, chosen = choose_correction(config)
        placement = place_run(config, view)
        config, transport = choose_transport(config, placement)
        run = resolve(config)
        notices = [*check_settings(run), *_reward_notice(run)]
        engine = config.engine
        wanted = assume_budget(config).train_engine(config.model.path, engine.max_updates)
        layout = layout_elsewhere(wanted, engine.backend, engine.num_ranks)
        config, budget = settle_budget(config, layout, placement)
        config, parking, turns = choose_parking(config, estimate_if_known(config, layout, placement), placement)
        batch = BatchArithmetic(config, layout)
        return plan_unseen(
            placement,
            lambda: with_parked(estimate_memory(config, layout, placement), parking, placement),
            rows=[
                *batch.rows(),
                *_describe_routes(config, batch),
                *_describe_copies(config, layout),
                layout_row(layout, engine.backend),
                *_chosen([f"{engine}{_AS_HERE}" for engine in engines]),
                *_chosen([*choices, *chosen, *budget, *turns]),
                ("weights", transport),
            ],
            notices=[*notices, *batch.notices()],
            facts={"batch": batch.as_data()},
        )

    def plan_rehearsal(self, config: GrpoConfig, folder: Path) -> RunPlan:
        return _run_plan(shrink_run(config, folder).prepare())

    def find_view(self, config: GrpoConfig, words: str) -> ClusterView:
        """Also "live", the Ray cluster, and "", where the launcher would start."""
        return find_view(config, words)

    def request_resources(self, config: GrpoConfig, view: ClusterView) -> ResourceRequest:
        return request_resources(config, view)

    def companions(self, config: GrpoConfig, settings: Mapping[str, SettingValue]) -> Mapping[str, SettingValue]:
        """Roles that take turns cannot lag."""
        return _IN_TURNS if "cluster.colocate" in settings and config.async_.mode != "on-policy pipeline" else {}


def _reward_notice(run: ResolvedRun) -> list[str]:
    """Refuse a reward that does not exist; what one needs may be installed where the run will be."""
    try:
        check_rewards(run)
    except BackendError as error:
        return [f"on this machine {error}"]
    return []


def _run_plan(preflight: Preflight) -> RunPlan:
    batch = _batch(preflight)
    return RunPlan(
        rows=describe_plan(preflight),
        placement=preflight.placement,
        memory=preflight.memory,
        facts={"batch": batch.as_data()},
    )


def _batch(preflight: Preflight) -> BatchArithmetic:
    return BatchArithmetic(preflight.config, preflight.layout, preflight.prompts.train_counts.longest)


def describe_plan(preflight: Preflight) -> list[tuple[str, str]]:
    """Rows of (what, how much), in the order to read them."""
    config, model, prompts = preflight.config, preflight.model, preflight.prompts
    threads, batch, memory = plan_threads(config), _batch(preflight), preflight.memory
    memory_rows = memory.rows(preflight.placement)[1:] if memory else [("memory", _weights_text(preflight))]
    rows = [
        ("model", f"{model.family}, {count_text(model.num_parameters)} parameters, {model.path}"),
        ("data", _describe_data(preflight)),
        *_describe_mix(preflight),
        *_describe_curriculum(config),
        sample_row("a prompt", prompts.train[0].text, prompts.template),
        ("processes", _describe_processes(preflight, threads)),
        *_chosen(preflight.choices),
        *memory_rows,
        *batch.rows(),
        *_describe_copies(config, preflight.layout),
        *_describe_routes(config, batch),
        ("asynchrony", f"{config.async_.mode}, staleness {config.async_.staleness_threshold:g}"),
        *_describe_sync(preflight),
        *_describe_environment(preflight),
        *[("reward", note) for note in (*preflight.reward_notes, *preflight.reward_trials)],
        ("length", f"{preflight.num_updates} updates of {batch.groups_per_update} prompts each"),
        ("objective", _describe_objective(config)),
        *_describe_critic(config),
        *[("objective", tried) for tried in preflight.objective_trial],
        (
            "checkpoints",
            f"{size_text(preflight.checkpoint_bytes)} each, {size_text(preflight.required_bytes)} of disk in all",
        ),
    ]
    if config.validates_every:
        often = f"before training, every {config.validates_every} updates and at the end"
        rows += [("validation", f"{often}, {each.describe()}") for each in preflight.run.sets]
        rows.append(("validation", _describe_pace(config)))
    notices = [
        *preflight.notices,
        *batch.notices(),
        *_batch_notice(batch.groups_per_update, len(prompts.train)),
        *_thread_notice(preflight, threads),
        *_colocation_notice(preflight),
        *tracker_notices(config.log),
    ]
    rows += [("notice", notice) for notice in [*notices, *(memory.notices(preflight.placement) if memory else [])]]
    return [*rows, ("prompt tokens", f"longest {prompts.train_counts.longest}, limit {config.data.max_prompt_tokens}")]


def _batch_notice(num_wanted: int, num_prompts: int) -> list[str]:
    if num_wanted <= num_prompts:
        return []
    return [
        f"an update takes {num_wanted} prompts (async.mini_batch_size x async.require_batches), and an epoch has "
        f"{num_prompts}: lower them for more updates"
    ]


def _chosen(choices: Sequence[str]) -> list[tuple[str, str]]:
    return [("chosen", choice) for choice in choices]


def _describe_sync(preflight: Preflight) -> list[tuple[str, str]]:
    """Return how weights travel to the engines, and what travels where it is not simply all of them."""
    rollout, lora_sync = preflight.config.rollout, preflight.lora_sync
    rows = [("weights", preflight.transport)] + ([("weights", str(lora_sync))] if lora_sync.why else [])
    if rollout.full_sync_every > 1:
        copy = size_text(preflight.model.num_parameters * rollout.bytes_per_weight)
        often = f"all of them every {rollout.full_sync_every} versions, what has changed in between"
        rows.append(("weights", f"{often}: trainer-0 and each engine keep a copy of {copy} in main memory"))
    return rows


def _describe_routes(config: GrpoConfig, batch: BatchArithmetic) -> list[tuple[str, str]]:
    """Return how many bytes say which experts the tokens of an update took; compression takes some of them away."""
    token_bytes = route_bytes(config.model.path)
    if config.rollout.replay_routes == "off" or not token_bytes:
        return []
    num_bytes = batch.samples_per_update * batch.tokens_per_sample * token_bytes
    return [("routes", f"{token_bytes} bytes a token, at most {size_text(num_bytes)} an update, on each trainer rank")]


def _describe_copies(config: GrpoConfig, layout: TrainLayout | None) -> list[tuple[str, str]]:
    """Return what the copies take from which a rank that dies is replaced."""
    if layout is None or not (num_bytes := copied_bytes(config, layout)):
        return []
    where = "of main memory on each trainer rank"
    return [("copies", f"{size_text(num_bytes // 2)} {where}, and {size_text(num_bytes)} while they are made")]


def _describe_objective(config: GrpoConfig) -> str:
    algorithm = config.algorithm
    taught = f"{algorithm.distillation_coefficient:g} x divergence from {as_written(config.teacher.path)}"
    parts = [f"{as_written(algorithm.advantage)} advantages"] * algorithm.needs_reward + [
        taught
    ] * algorithm.needs_teacher
    return f"{' + '.join(parts)}, {as_written(algorithm.loss)} loss"


def _describe_critic(config: GrpoConfig) -> list[tuple[str, str]]:
    if not config.algorithm.needs_critic:
        return []
    critic = config.critic
    lam = config.algorithm.resolved_gae_lambda
    of_values = lam if critic.gae_lambda is None else critic.gae_lambda
    alone = f", alone for {critic.warmup_updates} updates" if critic.warmup_updates else ""
    start = critic.path or "the policy's weights and a new head"
    return [
        (
            "critic",
            f"from {start}, on the trainer's ranks, learning rate {critic.learning_rate:g}{alone}; lambda {lam:g} for "
            f"the policy, {of_values:g} for the critic",
        )
    ]


def _describe_pace(config: GrpoConfig) -> str:
    if config.validation_goes_on:
        return "beside training: new weights do not wait for its end, and each answer says its version"
    return "new weights wait for its end, so that one version answers all"


def _describe_environment(preflight: Preflight) -> list[tuple[str, str]]:
    agent = preflight.config.agent
    if agent.is_set:
        what = " ".join(map(as_written, agent.command)) or f"outside, from port {preflight.config.rollout.serve_port}"
        limits = f"{agent.deadline_s:g} s and {agent.max_calls} calls for each episode, {agent.max_running} at once"
        return [("agent", f"{what}: {limits}")]
    return [
        (
            "environment",
            f"{each.table and each.table + ': '}{as_written(each.settings.name)}: at most "
            f"{each.settings.max_turns} turns and {each.settings.max_tokens} tokens after the prompt, "
            f"{each.settings.step_timeout_s:g} s for each answer",
        )
        for each in preflight.run.environments
    ]


def _describe_mix(preflight: Preflight) -> list[tuple[str, str]]:
    """Each source of a mix."""
    if not preflight.config.data.mix:
        return []
    total = sum(source.weight for source in preflight.run.sources)
    rows = []
    for source in preflight.run.sources:
        share, where = source.weight / total, as_written(source.data.path)
        text = f"{source.name}: {share:.3g} of the groups, {len(source.prompts)} prompts from {where}"
        if source.counts.too_long:
            text += f" ({source.counts.too_long} of {source.counts.read} left out: too long)"
        text += f", environment {as_written(source.environment.settings.name)}" if source.environment.is_set else ""
        text += f", reward {' + '.join(source.judge.settings.all_weights)}" if source.judge.is_set else ""
        rows.append(("source", text))
    return rows


def _describe_curriculum(config: GrpoConfig) -> list[tuple[str, str]]:
    curriculum = config.curriculum
    if not curriculum.is_set:
        return []
    return [
        (
            "curriculum",
            f"prompts with a success rate below {curriculum.low:g} or above {curriculum.high:g} "
            f"are drawn {curriculum.outside_weight:g} times as often as others",
        )
    ]


def _describe_data(preflight: Preflight) -> str:
    counts = preflight.prompts.train_counts
    path, num_sources = as_written(preflight.config.data.path), len(preflight.run.sources)
    text = f"{counts.kept} training prompts from {path or f'a mix of {num_sources} sources'}"
    if counts.too_long:
        text += f" ({counts.too_long} of {counts.read} left out: too long)"
    if counts.held_out:
        text += f" ({counts.held_out} left out: they ask a held-out question)"
    return f"{text}, {len(preflight.prompts.eval)} held out"


def _describe_processes(preflight: Preflight, threads: dict[str, int]) -> str:
    config, layout = preflight.config, preflight.layout
    shared = f"{layout}, " if layout.num_ranks > 1 else ""
    return (
        f"{config.engine.num_ranks} x trainer ({config.engine.backend}, {shared}{config.engine.device}, "
        f"{threads['trainer']} threads), "
        f"{config.rollout.num_engines} x rollout ({config.rollout.backend}, {config.rollout.device}, "
        f"{threads['rollout']} threads){_teacher_text(config, threads)}; launcher {config.cluster.launcher}"
    )


def _teacher_text(config: GrpoConfig, threads: dict[str, int]) -> str:
    teacher = config.teacher
    if not teacher.is_set:
        return ""
    place = "with the rollout engines" if teacher.colocate else "apart"
    how = f"{teacher.backend}, {teacher.device}, {place}, {threads['teacher']} threads"
    return f", {teacher.num_replicas} x teacher ({how})"


def _thread_notice(preflight: Preflight, threads: dict[str, int]) -> list[str]:
    config = preflight.config
    samplers = threads["rollout"] * config.rollout.num_engines
    if config.teacher.is_set:
        samplers += threads["teacher"] * config.teacher.num_replicas
    wanted = max(threads["trainer"] * config.engine.num_ranks, samplers)  # each kind waits for the other
    if wanted <= available_cpus():
        return []
    return [
        f"the processes want {wanted} threads and there are {available_cpus()} CPUs: they will slow each other down"
    ]


def _colocation_notice(preflight: Preflight) -> list[str]:
    groups = {group.role: group for group in preflight.placement.groups}
    if not preflight.config.teacher.colocate or groups["teacher"].shares_devices_with:
        return []
    return ["teacher.colocate has no effect: no devices are given out here, each role takes the one that it names"]


def _weights_text(preflight: Preflight) -> str:
    """Return what can be said of a family whose formulas are not known."""
    held = preflight.layout.held_bytes(preflight.model.num_parameters, trains_all=False)
    return f"no estimate for {preflight.model.family} but its weights: {size_text(held)} on each trainer rank"
