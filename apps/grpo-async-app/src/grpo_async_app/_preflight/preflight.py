"""Everything that can be wrong with a run, found before anything starts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_async_app._config.critic import check_bootstrap, check_critic_folder
from grpo_async_app._config.environment_images import check_environment_images
from grpo_async_app._config.parking import Parking
from grpo_async_app._config.resolved import Judge, ResolvedRun, Source, resolve
from grpo_async_app._config.reward_model import check_reward_model, reward_model_of
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._config.weight_sync import LoraSync, choose_lora_sync, choose_transport
from grpo_async_app._preflight.backends import choose_backends
from grpo_async_app._preflight.budget import settle_budget
from grpo_async_app._preflight.correction import choose_correction
from grpo_async_app._preflight.data import check_validated, read_data, set_notices
from grpo_async_app._preflight.engines import (
    check_backends,
    check_cut,
    check_engine_model,
    check_numerics,
    check_positions,
    check_teacher,
    check_turns,
)
from grpo_async_app._preflight.estimates import estimate_if_known
from grpo_async_app._preflight.placement import find_view, place_run
from grpo_async_app._preflight.platform import choose_for_platform, device_kinds, engine_kinds, slow_formats
from grpo_async_app._preflight.settings import check_choices, check_correction, engine_notices
from grpo_async_app._preflight.sources import check_end, check_rewards, naming
from grpo_async_app._preflight.trainer import check_devices, plan_trainer
from grpo_async_app._preflight.turns import choose_parking, with_parked
from grpo_async_app._scoring.trial import try_reward
from offbeat_actors import check_processes
from offbeat_core import ConfigError, TrainLayout, as_written
from offbeat_data import (
    PromptSet,
    Tokenizer,
    check_data_paths,
    check_rows,
    fill_known_data,
    fill_known_reward,
    load_tokenizer,
)
from offbeat_objectives import try_functions
from offbeat_placement import ClusterView, Placement
from offbeat_recipes import RunMemory
from offbeat_run import (
    ExaminedModel,
    HubModels,
    Problems,
    check_model,
    doing,
    fetch_models,
    has_hub_model,
    inspect_model,
)
from offbeat_weightsync import transport_class


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Checked settings and data of a run.

    Args:
        run: with its prompts, and with what was chosen for what was left open.
        written: configuration before the choices, which the run folder keeps: a resume under other settings chooses
            anew. Engines and the token budget are chosen in it: a resumed run samples with the engines that it was
            begun with, where others have been installed too, and computes in the same micro-batches.
        hub: models that came from the Hub.
        model: folder of the policy.
        prompts: training prompts of all sources, held-out prompts and their counts.
        placement: every rank in its place, on the nodes that the launcher would start it on.
        layout: how the ranks of the trainer share the model.
        memory: estimates of one rank of each role; None for a family whose formulas are not known.
        parking: what roles that take turns put away.
        notices: choices that work and are probably not meant.
        choices: what the machine has decided, with reasons.
        lora_sync: what engines get of a policy with LoRA, and why.
        objective_trial: what came of the loss and the advantage of the user's own on random data, a sentence each.
        reward_notes: how functions of the user's own are called, and programs of the model run, in words.
        reward_trials: what rewards made of a made-up completion, in words; none where no function of the user's own
            takes part.
    """

    run: ResolvedRun
    written: GrpoConfig
    model: ExaminedModel
    prompts: PromptSet
    placement: Placement
    layout: TrainLayout
    memory: RunMemory | None = None
    parking: Parking = Parking()
    notices: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    hub: HubModels = HubModels()
    lora_sync: LoraSync = LoraSync(what="merged")
    transport: str = ""
    reward_notes: tuple[str, ...] = ()
    reward_trials: tuple[str, ...] = ()
    objective_trial: tuple[str, ...] = ()

    @property
    def config(self) -> GrpoConfig:
        """Return the configuration with what was chosen for what was left open."""
        return self.run.config

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


def check_run(config: GrpoConfig, problems: Problems | None = None) -> Preflight:
    """Check a configuration against the machine, the model folder and the data.

    Args:
        config: of the run.
        problems: other mistakes, which are reported together with those of the configuration.

    Raises:
        UserError: what is wrong, with what to do; mistakes of several sections together.
    """
    config, known = _fill_known_set(config)
    run, hub, model, reward_notes, notices = _check_sections(resolve(config), problems)
    tokenizer = _load_tokenizer(run, model)
    run, prompts = read_data(run, tokenizer)
    # From here on torch may be imported, which takes seconds: the mistakes above are reported at once.
    doing("checking engines and devices", f"{prompts.train_counts.read} training rows are read")
    view, objective_trial = find_view(run.config), _try_objective(run.config)
    run, engines = _choose_engines(run, view)
    written, (run, choices, more_notices) = run.config, _choose(run, view, notices)
    placement = place_run(run.config, view)
    layout = _plan_engines(run, view, model, tokenizer)
    config, transport = choose_transport(run.config, placement)
    config, memory, parking, fitted = _fit_memory(config, layout, placement, prompts.train_counts.longest)
    run = replace(run, config=config)
    check_validated(run)
    return Preflight(
        run=run,
        written=hub.name_in(replace(written, engine=written.engine.settle_budget_as(config.engine))),
        hub=hub,
        model=model,
        prompts=prompts,
        placement=placement,
        layout=layout,
        memory=memory,
        parking=parking,
        notices=(*notices, *more_notices, *prompts.notices, *set_notices(run, prompts.train)),
        choices=(*known, *engines, *choices, *fitted),
        lora_sync=choose_lora_sync(run.config),
        transport=transport,
        reward_notes=reward_notes,
        reward_trials=_try_rewards(run),
        objective_trial=objective_trial,
    )


def _fill_known_set(config: GrpoConfig) -> tuple[GrpoConfig, tuple[str, ...]]:
    """Set columns and reward of a data set of the Hub that is known by name; return each choice in words."""
    data, choices = fill_known_data(config.data)
    reward, more = config.reward, tuple[str, ...]()
    if not (reward.is_set or config.environment.name or config.agent.is_set):
        reward, more = fill_known_reward(reward, data)
    return replace(config, data=data, reward=reward), (*choices, *more)


def _check_sections(
    run: ResolvedRun, problems: Problems | None
) -> tuple[ResolvedRun, HubModels, ExaminedModel, tuple[str, ...], tuple[str, ...]]:
    """Check what sections say of themselves; their mistakes are reported together.

    Returns:
        The run with its models on this machine, what came from the Hub, the policy, how rewards are called, in words,
        and notices of the choices.
    """
    config, problems = run.config, problems or Problems()
    doing("checking the configuration")
    notices = check_choices(run, problems)
    with problems.collected():
        check_end(config)
    with problems.collected():
        check_data_paths(config.data)
    with problems.collected():
        reward_notes = check_rewards(run)
    with problems.collected():
        check_backends(config)
    if has_hub_model(config):
        problems.raise_all()  # nothing is fetched for a run that cannot begin
    hub = HubModels()
    with problems.collected():
        config, hub = fetch_models(config)
        doing("checking the model", as_written(config.model.path))
        model = inspect_model(config.model.path)
        check_model(model.path)
        check_positions(config, model)
    with problems.collected():
        if (scorer := reward_model_of(config.reward)) is not None:
            check_reward_model(scorer)
    for key, path in {"teacher.path": config.teacher.path, "critic.path": config.critic.path}.items():
        with problems.collected():
            if path:
                inspect_model(path, key)
    for source in run.sources if problems.texts else ():
        with problems.collected(), naming(source):
            check_rows(source.data)
    problems.raise_all()
    return resolve(config), hub, model, reward_notes, notices


def _load_tokenizer(run: ResolvedRun, model: ExaminedModel) -> Tokenizer:
    """Load the tokenizer of the policy, and refuse other models of the run that do not fit the policy's."""
    config = run.config
    for source in run.sources:
        with naming(source):
            check_environment_images(source.environment.settings, model.path, has_teacher=config.teacher.is_set)
    doing("loading the tokenizer", as_written(config.model.path))
    tokenizer = load_tokenizer(model.path, config.model.trust_remote_code)
    check_critic_folder(config.critic, tokenizer, trust=config.model.trust_remote_code)
    check_bootstrap(config.critic, model, config.rollout.max_model_len)
    return tokenizer


def _choose_engines(run: ResolvedRun, view: ClusterView) -> tuple[ResolvedRun, list[str]]:
    has_images = any(prompt.pictures for source in run.sources for prompt in source.prompts)
    config, engines = choose_backends(run.config, engine_kinds(run.config, view), has_images=has_images)
    return replace(run, config=config), engines


def _choose(
    run: ResolvedRun, view: ClusterView, known: Sequence[str]
) -> tuple[ResolvedRun, tuple[str, ...], tuple[str, ...]]:
    """Choose for the machine what the configuration leaves open.

    Returns:
        The run without open choices, each choice with its reason, and notices besides those that are `known`.
    """
    if not view.reserves:
        check_processes(run.config.processes)
    sampling, training = device_kinds(run.config, view)
    config, choices = choose_for_platform(run.config, sampling, training)
    config, more_choices = choose_correction(config)
    run = replace(run, config=config)
    slow = () if view.reserves else slow_formats(config, sampling)
    return run, (*choices, *more_choices), (*check_correction(run, known), *engine_notices(config), *slow)


def _plan_engines(run: ResolvedRun, view: ClusterView, model: ExaminedModel, tokenizer: Tokenizer) -> TrainLayout:
    """Refuse what engines, devices and the teacher cannot do; return how the trainer's ranks share the model."""
    config, prompts = run.config, [prompt for source in run.sources for prompt in source.prompts]
    check_cut(config)
    check_numerics(config)
    check_turns(config)
    check_devices(config, view)
    check_teacher(config, tokenizer)
    layout = plan_trainer(config, _count_updates(config, len(prompts)), view)
    check_engine_model(config.rollout.backend, model)
    if config.agent.is_set and any(prompt.pictures for prompt in prompts):
        raise ConfigError("the training prompts have images, which the endpoint of section agent does not take")
    return layout


def _fit_memory(
    config: GrpoConfig, layout: TrainLayout, placement: Placement, longest_prompt: int
) -> tuple[GrpoConfig, RunMemory | None, Parking, tuple[str, ...]]:
    """Choose what depends on how much memory the run needs; return the estimate, and each choice with its reason."""
    config, budget = settle_budget(config, layout, placement, longest_prompt)
    memory = estimate_if_known(config, layout, placement, longest_prompt)
    config, parking, turns = choose_parking(config, memory, placement)
    return config, memory and with_parked(memory, parking, placement), parking, (*budget, *turns)


def _count_updates(config: GrpoConfig, num_prompts: int) -> int:
    """Updates of the whole run, when no group is filtered or dropped."""
    of_data = None if config.is_endless else -(-config.data.epochs * num_prompts // config.async_.groups_per_update)
    return min(number for number in (of_data, config.engine.max_updates or None) if number is not None)


def _try_objective(config: GrpoConfig) -> tuple[str, ...]:
    return try_functions(config.algorithm, config.reward.all_weights if config.reward.is_set else None)


def _try_rewards(run: ResolvedRun) -> tuple[str, ...]:
    """Try each reward once, on a prompt of the first source that it scores."""
    first: dict[Judge, Source] = {}
    for source in run.sources:
        if source.judge.is_set:
            first.setdefault(source.judge, source)
    trials = []
    for judge, source in first.items():
        with naming(source):
            trials.append(try_reward(judge.settings, source.prompts[0], run.config.cluster))
    return tuple(trial for trial in trials if trial)
