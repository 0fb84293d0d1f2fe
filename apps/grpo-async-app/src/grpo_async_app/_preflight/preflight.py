"""Everything that can be wrong with a run, found before anything starts."""

import importlib.util
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Final

from grpo_async_app._config.agent import program_words
from grpo_async_app._config.critic import check_bootstrap, check_critic, check_critic_folder, load_critic_backend
from grpo_async_app._config.reward_model import check_one_reward_model, check_reward_model, reward_model_of
from grpo_async_app._config.sections import GrpoConfig, check_engine_options
from grpo_async_app._config.shown import check_shown
from grpo_async_app._config.sources import (
    SourceSettings,
    TrainingSource,
    check_comparing,
    check_end,
    check_lengths,
    check_own_data,
    check_sources,
    load_sources,
    naming,
    scored_alone,
    source_settings,
    tools_of,
    trained_alone,
    turn_templates,
    with_tools,
)
from grpo_async_app._config.validation_sets import (
    ValidationSet,
    alone_notices,
    check_validated,
    held_out_set,
    load_sets,
    shared_notices,
)
from grpo_async_app._config.weight_sync import LoraSync, choose_lora_sync, choose_transport
from grpo_async_app._preflight.backends import check_backends, check_cut, check_turns
from grpo_async_app._preflight.correction import choose_correction
from grpo_async_app._preflight.engine_formats import rounding_reason
from grpo_async_app._preflight.engine_models import check_engine_model, check_positions, check_teacher
from grpo_async_app._preflight.estimates import estimate_memory
from grpo_async_app._preflight.placement import find_view, place_run
from grpo_async_app._preflight.platform import choose_for_platform, sampling_kind, slow_formats
from grpo_async_app._scoring.trial import try_reward
from offbeat_actors import check_kinds, check_processes
from offbeat_core import (
    BackendError,
    ConfigError,
    ModelError,
    TrainBackend,
    TrainLayout,
    check_schedule,
    installed_backends,
    load_backend,
)
from offbeat_data import (
    PromptSet,
    TurnTemplate,
    build_environment,
    build_reward,
    check_data_paths,
    load_tokenizer,
)
from offbeat_objectives import check_algorithm, try_functions
from offbeat_placement import ClusterView, Placement
from offbeat_recipes import RunMemory
from offbeat_run import HELD_OUT, ExaminedModel, Problems, check_model, doing, inspect_model
from offbeat_weightsync import transport_class

LENGTH_KEYS: Final = ("engine.max_updates", "data.epochs")
"""Settings that say how long a run is."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Checked settings and data of a run.

    Args:
        config: with what was chosen for what was left open.
        written: the same before the choices, which the run folder keeps: a resume under other settings chooses anew.
        prompts: training prompts of all sources, held-out prompts and their counts.
        sources: of the training prompts, in the order in which draws count them; one without a mix.
        sets: that a validation uses; that of the held-out prompts first, where there are any.
        placement: every rank in its place, on the nodes that the launcher would start it on.
        layout: how the ranks of the trainer share the model.
        memory: estimates of one rank of each role; None for a family whose formulas are not known.
        templates: put the words of environments into tokens, by their keys in `GrpoConfig.environments`.
        notices: choices that work and are probably not meant.
        choices: what the machine has decided, with reasons.
        lora_sync: what engines get of a policy with LoRA, and why.
        objective_trial: what came of the loss and the advantage of the user's own on random data, a sentence each.
        reward_notes: how functions of the user's own are called, and programs of the model run, in words.
        reward_trials: what rewards made of a made-up completion, in words; none where no function of the user's own
            takes part.
    """

    config: GrpoConfig
    written: GrpoConfig
    model: ExaminedModel
    prompts: PromptSet
    sources: tuple[TrainingSource, ...]
    sets: tuple[ValidationSet, ...]
    placement: Placement
    layout: TrainLayout
    memory: RunMemory | None = None
    templates: Mapping[str, TurnTemplate]
    notices: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    lora_sync: LoraSync = LoraSync(what="merged")
    transport: str = ""
    reward_notes: tuple[str, ...] = ()
    reward_trials: tuple[str, ...] = ()
    objective_trial: tuple[str, ...] = ()

    @property
    def num_groups(self) -> int | None:
        """Groups that the data gives, all epochs together; None: no end."""
        return None if self.config.is_endless else self.config.data.epochs * len(self.prompts.train)

    @property
    def has_images(self) -> bool:
        return any(prompt.pictures for prompt in self.prompts.train)

    @property
    def max_updates(self) -> int | None:
        """Updates after which the run ends; None: with the data."""
        return self.config.engine.max_updates or None

    @property
    def num_updates(self) -> int:
        """Updates of the whole run, when no group is filtered or dropped."""
        return _count_updates(self.config, len(self.prompts.train))

    @property
    def checkpoint_bytes(self) -> int:
        is_lora = bool(self.config.engine.lora_rank)
        return self.config.checkpoint.checkpoint_bytes(self._num_kept, is_lora=is_lora)

    @property
    def required_bytes(self) -> int:
        """Room on the disk."""
        is_lora = bool(self.config.engine.lora_rank)
        return self.config.checkpoint.room_bytes(self._num_kept, is_lora=is_lora) + self._versions_bytes

    @property
    def _num_kept(self) -> int:
        """Parameters that a checkpoint holds: of the policy, and of its critic."""
        if not self.config.algorithm.needs_critic:
            return self.model.num_parameters
        path = self.config.critic.path
        return self.model.num_parameters + (inspect_model(path) if path else self.model).num_parameters

    @property
    def _versions_bytes(self) -> int:
        """Bytes of weights on their way in the run folder: a version, and the next that is being written."""
        rollout = self.config.rollout
        in_run_folder = transport_class(rollout.weight_transport).writes_files and not rollout.weight_folder
        return 2 * self.model.num_parameters * rollout.bytes_per_weight if in_run_folder else 0


def check_run(config: GrpoConfig) -> Preflight:
    """Check a configuration against the machine, the model folder and the data.

    Raises:
        UserError: what is wrong, with what to do; mistakes of several sections together.
    """
    doing("checking the model", config.model.path)
    notices, model, reward_notes = _check_sections(config)
    trust = config.model.trust_remote_code
    for source in source_settings(config):
        with naming(source):
            check_shown(source.environment, model.path, has_teacher=config.teacher.is_set)
    doing("loading the tokenizer", config.model.path)
    tokenizer = load_tokenizer(model.path, trust)
    check_critic_folder(config.critic, tokenizer, trust=trust)
    check_bootstrap(config.critic, model, config.rollout.max_model_len)
    tools = tools_of(config)
    templates = turn_templates(config, tokenizer, tools)
    prompts, sources = load_sources(config, tokenizer, tools)
    own_sets = load_sets(config, tokenizer, tools) if config.validates_every else []  # others are for `eval` alone
    config = replace(config, data=with_tools(config.data, tools.get("", [])))
    # From here on torch may be imported, which takes seconds: the mistakes above are told at once.
    doing("checking engines and devices", f"{prompts.train_counts.read} training rows are read")
    view = find_view(config)
    if not view.reserves:
        check_processes(config.processes)
    objective_trial = _try_objective(config)
    kind = sampling_kind(config, view)
    written = config
    config, choices = choose_for_platform(config, kind)
    config, chosen = choose_correction(config)
    notices = (*notices, *_check_correction(config, notices))
    placement = place_run(config, view)
    notices = (*notices, *_engine_notices(config), *(() if view.reserves else slow_formats(config, kind)))
    check_cut(config)
    lora_sync = choose_lora_sync(config)
    transport = choose_transport(config, placement)
    backend: TrainBackend = load_backend("offbeat.engine", config.engine.backend)
    check_turns(config, backend)
    _check_devices(config, view)
    check_teacher(config, tokenizer)
    num_updates = _count_updates(config, len(prompts.train))
    config.profile.check(config.traced_roles, num_updates)
    layout = _plan_trainer(backend, config, num_updates, view)
    check_engine_model(config.rollout.backend, model)
    if config.agent.is_set and any(prompt.pictures for prompt in prompts.train):
        raise ConfigError("the training prompts have images, which the endpoint of section agent does not take")
    held_out = prompts.eval[: config.eval.max_prompts or None]
    sets = (*([held_out_set(config, held_out)] if held_out else []), *own_sets)
    check_validated(config, has_sets=bool(sets))
    notices = (*notices, *prompts.notices, *shared_notices(own_sets, prompts.train), *_eval_notices(config, sets))
    notices = (*notices, *alone_notices(sets))
    return Preflight(
        config=config,
        written=written,
        model=model,
        prompts=prompts,
        sources=sources,
        sets=sets,
        placement=placement,
        layout=layout,
        memory=_estimate_memory(config, layout, placement, prompts.train_counts.longest),
        templates=templates,
        notices=notices,
        choices=(*choices, *chosen),
        lora_sync=lora_sync,
        transport=transport,
        reward_notes=reward_notes,
        reward_trials=_try_rewards(config, sources),
        objective_trial=objective_trial,
    )


def _check_sections(config: GrpoConfig) -> tuple[tuple[str, ...], ExaminedModel, tuple[str, ...]]:
    """Check what sections say of themselves; their mistakes are reported together.

    Returns:
        Notices of the choices, the model, and how rewards are called, in words.
    """
    problems = Problems()
    with problems.collected():
        notices = _check_choices(config)
        check_end(config)
    with problems.collected():
        model = inspect_model(config.model.path)
        check_model(model.path)
        check_positions(config, model)
    with problems.collected():
        check_data_paths(config.data)
    with problems.collected():
        reward_notes = check_reward(config)
        if (scorer := reward_model_of(config.reward)) is not None:
            check_reward_model(scorer)
    with problems.collected():
        check_backends(config)
    problems.raise_all()
    return notices, model, reward_notes


def check_settings(config: GrpoConfig) -> tuple[str, ...]:
    """Check what settings alone tell, wherever the run will be: choices that work and are probably not meant."""
    return (*_check_choices(config), *_engine_notices(config))


def _check_choices(config: GrpoConfig) -> tuple[str, ...]:
    """Return what `check_settings` does without asking the adapters of the engines, some of which import torch."""
    source_notices = check_sources(config)
    _check_agent(config)
    check_engine_options(config)
    algorithm = config.algorithm
    check_critic(config.critic, is_asked=algorithm.needs_critic, masks_truncated=algorithm.mask_truncated)
    config.teacher.check(is_learned_from=config.algorithm.needs_teacher)
    if config.validates_every and not (config.is_judged or config.eval.sets):
        raise ConfigError("eval.every_updates needs something that judges: set reward.name, or eval.every_updates = 0")
    notices = _check_objective(config)
    check_lengths(config)
    _check_mode(config)
    return (*notices, *source_notices, *_fp8_notice(config))


def _check_correction(config: GrpoConfig, told: tuple[str, ...]) -> list[str]:
    """Check what depends on the choice of the correction; notices that are not told yet."""
    return [notice for notice in _check_objective(config) if notice not in told]


def _check_objective(config: GrpoConfig) -> tuple[str, ...]:
    """Check section algorithm; its overlong buffer against the source of the shortest responses, which is named."""
    check = partial(check_algorithm, config.algorithm, samples_per_prompt=config.rollout.samples_per_prompt)
    shortest = min(source_settings(config), key=lambda source: config.response_tokens(source.environment))
    if shortest.name:
        check()  # what is wrong for every source names none
    with naming(shortest):
        return check(max_tokens=config.response_tokens(shortest.environment))


def _check_agent(config: GrpoConfig) -> None:
    """Refuse what an agent does not go together with."""
    agent = config.agent
    agent.check()
    if not agent.is_set:
        return
    if config.environments:
        raise ConfigError("environment.name and section agent both answer the model: set one of them")
    if config.teacher.is_set:
        raise ConfigError("section teacher: it scores what follows the data's prompts, and an agent writes its own")
    if config.algorithm.overlong_buffer_tokens:
        raise ConfigError("algorithm.overlong_buffer_tokens: episodes of an agent have no length to come near to")
    if config.cluster.launcher != "local":
        raise ConfigError(
            f'cluster.launcher = "{config.cluster.launcher}": agents reach the engines over loopback, so all are on '
            'one machine; set it to "local"'
        )
    if agent.may_post_reward is False and not config.reward.is_set and not config.data.mix:
        raise ConfigError("agent.may_post_reward = false leaves the reward to section reward: give reward.name")
    if agent.is_outside and config.rollout.serve_port is None:
        raise ConfigError("agent.is_outside = true: set rollout.serve_port, where agents ask for what to do")
    if importlib.util.find_spec("offbeat_serve") is None:
        raise BackendError('section agent needs offbeat-serve; install it with: pip install "grpo-async-app[serve]"')
    if agent.command and not agent.preload and shutil.which(program_words(agent.command)[0]) is None:
        raise ConfigError(f"agent.command: there is no program {agent.command[0]!r}, or it cannot be executed")


def _engine_notices(config: GrpoConfig) -> list[str]:
    """Return what the adapters of the engines know against their settings, on devices that need not be here."""
    teacher = [(config.teacher.backend, config.teacher_engine(0))] if config.teacher.is_set else []
    notices: dict[str, None] = {}
    for backend, settings in [(config.rollout.backend, config.rollout), *teacher]:
        if backend in installed_backends("offbeat.rollout"):
            notify = getattr(load_backend("offbeat.rollout", backend), "notices_of", None)
            notices |= dict.fromkeys(notify(settings) if notify else ())
    return list(notices)


def _fp8_notice(config: GrpoConfig) -> list[str]:
    rounding = rounding_reason(config.rollout)
    if not rounding or config.algorithm.correction != "none":
        return []
    return [f"{rounding}, and algorithm.correction = none leaves it at that; token_tis is usual"]


def _eval_notices(config: GrpoConfig, sets: Sequence[ValidationSet]) -> list[str]:
    """Settings of the held-out prompts, where there are validation sets and no such prompts."""
    held_out = {"temperature": 0.0, "max_prompts": 0, "success_reward": 0.99}
    given = [f"eval.{name}" for name, default in held_out.items() if getattr(config.eval, name) != default]
    if not given or not config.validates_every or any(each.name == HELD_OUT for each in sets):
        return []
    return [f"{', '.join(given)}: of held-out prompts alone, and there are none; each of eval.sets has its own"]


def _estimate_memory(
    config: GrpoConfig, layout: TrainLayout, placement: Placement, longest_prompt: int
) -> RunMemory | None:
    try:
        return estimate_memory(config, layout, placement, longest_prompt)
    except ModelError:
        return None  # an estimate is a help: a family without one can be trained all the same


def check_same_data(begun: GrpoConfig, now: GrpoConfig) -> None:
    """Refuse to go on with other prompts than a run was begun with; more or fewer epochs are welcome."""
    before, after = _data_settings(begun), _data_settings(now)
    for key in [*before, *(key for key in after if key not in before)]:
        if before.get(key) != after.get(key):
            raise ConfigError(
                f"{key} was {before.get(key)!r} when the run began and would be {after.get(key)!r}: some prompts would "
                "be trained twice and others never; resume with the data it was begun with, or start a new run"
            )


def _data_settings(config: GrpoConfig) -> dict[str, object]:
    """Return all that decides which prompt is trained when, by its key."""
    data = config.data
    own = {f"data.{each.name}": getattr(data, each.name) for each in fields(data) if each.name not in ("epochs", "mix")}
    of_mix = {
        f"data.mix.{name}.{each.name}": getattr(source, each.name)
        for name, source in data.mix.items()
        for each in fields(source)
        if each.name not in ("success_reward", "environment", "reward")
    }
    return own | of_mix


def check_reward(config: GrpoConfig, *, trains: bool = True) -> tuple[str, ...]:
    """Return whoever judges is there: the reward section, or the environment, with prompts that it can judge.

    Args:
        config: of the run.
        trains: it judges groups that are trained on, not validation sets alone.

    Returns:
        How functions of the user's own are called, and programs of the model run, in words.
    """
    notes: dict[str, None] = {}
    for source in source_settings(config):
        with naming(source):
            notes |= dict.fromkeys(_check_judge(config, source, trains))
    if (model := reward_model_of(config.reward)) is not None:
        notes[f"reward_model: {model.num_replicas} x {model.path}, in processes of its own"] = None
    return tuple(notes)


def _check_judge(config: GrpoConfig, source: SourceSettings, trains: bool) -> Sequence[str]:
    """Return what `check_reward` does for one source."""
    reward, name = source.reward, source.environment.name
    is_judged = reward.is_set or bool(name) or config.agent.is_set
    notes: Sequence[str] = ()
    if reward.is_set or (config.algorithm.needs_reward and not is_judged):
        built = build_reward(reward)
        notes = built.notes
        check_comparing(built, (trained_alone if trains else scored_alone)(config, source.environment))
    if source.judge:
        check_one_reward_model(config.reward, reward)
    if name:
        build_environment(source.environment)
    check_own_data(source.environment, source.data.path, "path" if source.name else "data.path")
    return notes


def _try_objective(config: GrpoConfig) -> tuple[str, ...]:
    return try_functions(config.algorithm, config.reward.all_weights if config.reward.is_set else None)


def _try_rewards(config: GrpoConfig, sources: Sequence[TrainingSource]) -> tuple[str, ...]:
    """Try each reward once, on a prompt of the first source that it judges."""
    first: dict[str, TrainingSource] = {}
    for source in sources:
        if source.settings.reward.is_set:
            first.setdefault(source.settings.judge, source)
    trials = []
    for source in first.values():
        with naming(source.settings):
            trials.append(try_reward(source.settings.reward, source.prompts[0], config.cluster))
    return tuple(trial for trial in trials if trial)


def _plan_trainer(backend: TrainBackend, config: GrpoConfig, num_updates: int, view: ClusterView) -> TrainLayout:
    """Ask the trainer's backend whether so many ranks can train this model with these settings, and how."""
    if num_updates <= config.critic.warmup_updates:
        raise ConfigError(
            f"critic.warmup_updates = {config.critic.warmup_updates} leaves nothing for the policy: the run makes "
            f"{num_updates} updates (engine.max_updates, data.epochs); lower it or make the run longer"
        )
    wanted = config.train_engine(config.model.path, num_updates)
    check_schedule(wanted, length_keys=LENGTH_KEYS)
    if view.reserves:
        wanted = replace(wanted, device="auto")  # the devices are the nodes', and the driver need have none
    if config.algorithm.needs_critic:
        critic = config.critic_engine(config.model.path, num_updates)
        of_critic = load_critic_backend(config.critic.backend)
        _check_lengths(config, of_critic.plan(replace(critic, device=wanted.device), config.engine.num_ranks))
    layout = backend.plan(wanted, config.engine.num_ranks)
    _check_lengths(config, layout)
    return layout


def _check_lengths(config: GrpoConfig, layout: TrainLayout) -> None:
    """Refuse lengths that the trainer would refuse in the middle of the run.

    The limit itself is refused too: engines are given one token more, by which vLLM chooses the rotary frequencies of
    all requests.
    """
    longest, limit = config.rollout.max_model_len, layout.max_sequence_tokens
    if limit and longest >= limit:
        raise ConfigError(
            f"rollout.max_model_len = {longest} must be below {limit}: {layout.max_sequence_reason}; lower it"
        )


def _count_updates(config: GrpoConfig, num_prompts: int) -> int:
    """Updates of the whole run, when no group is filtered or dropped."""
    of_data = None if config.is_endless else -(-config.data.epochs * num_prompts // config.async_.groups_per_update)
    return min(number for number in (of_data, config.engine.max_updates or None) if number is not None)


def _check_mode(config: GrpoConfig) -> None:
    if config.cluster.colocate and config.async_.mode != "on-policy pipeline":
        raise ConfigError(
            "cluster.colocate = true: trainer and engines take turns, so nothing can be generated while it trains; "
            f"async is {config.async_.mode} (staleness_threshold = {config.async_.staleness_threshold:g}, "
            f"trigger_parameter_sync_step = {config.async_.trigger_parameter_sync_step}): set them to 0 and 1, with "
            "more steps in one update by async.require_batches; or cluster.colocate = false"
        )


def _check_devices(config: GrpoConfig, view: ClusterView) -> None:
    """Devices that settings name are here; those of a cluster are its nodes' to open, and here only kinds are known."""
    if view.reserves:
        check_kinds(config.devices)
        return
    named = {name for name in config.devices.values() if name not in ("auto", "cpu")}
    if not named:
        return
    from offbeat_device import open_device, rank_device  # imports torch: only where a device is named

    for name in sorted(named):
        open_device(name)
    rank_device(config.engine.device, 0, config.engine.num_ranks, setting="engine.device")
