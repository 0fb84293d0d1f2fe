"""Everything that can be wrong with a run, found before anything starts; where its ranks go; and the plan in words."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from offbeat_actors import check_kinds, check_processes, cluster_request, find_view
from offbeat_core import (
    ConfigError,
    ModelError,
    RoleName,
    TrainBackend,
    TrainLayout,
    as_written,
    check_schedule,
    load_backend,
    require_backend,
)
from offbeat_data import EpochOrder, Tokenizer, check_data_paths, check_rows, fill_known_data, load_tokenizer
from offbeat_placement import (
    ClusterView,
    Placement,
    RankGroup,
    ResourceRequest,
    choose_budget,
    read_shape,
    train_advice,
    train_memory,
)
from offbeat_recipes import RunMemory, sample_row
from offbeat_run import (
    LENGTH_KEYS,
    ExaminedModel,
    HubModels,
    Problems,
    check_model,
    count_text,
    doing,
    fetch_models,
    has_hub_model,
    inspect_model,
    size_text,
    tracker_notices,
)
from sft_app._config import EngineConfig, SftConfig
from sft_app._examples import Example, ExampleSet, load_examples
from sft_app._problems import NEEDS_HELD_OUT, check_settings


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run: the last batch of a run that ended with its data may have been smaller than the others.

    Args:
        position: in the data, of the next sequence.
    """

    updates: int = 0
    position: int = 0


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Checked settings and data of a run.

    Args:
        config: without open choices.
        written: as it was given, which the run folder keeps. The token budget is chosen in it: a resumed run computes
            in the micro-batches it was begun with.
        hub: models that came from the Hub.
        examples: what to learn from, and how many rows it is of.
        held_out: the held-out examples a validation uses.
        num_updates: optimizer steps of the whole run.
        placement: every rank in its place, on the nodes that the launcher would start it on.
        layout: how the ranks of the trainer share the model.
        memory: estimate of one rank; None for a family whose formulas are not known.
        choices: what the machine has decided, with reasons.
        notices: what is not as the recipe says.
        samples: sequences of the first example, each what it is and its text, special tokens included.
        begun: where it continues from.
    """

    config: SftConfig
    written: SftConfig
    hub: HubModels = HubModels()
    model: ExaminedModel
    examples: ExampleSet
    held_out: tuple[Example, ...]
    num_updates: int
    placement: Placement
    layout: TrainLayout
    memory: RunMemory | None = None
    choices: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    samples: tuple[tuple[str, str], ...] = ()
    begun: Progress = Progress()

    @property
    def order(self) -> EpochOrder:
        data = self.config.data
        return EpochOrder(len(self.examples.train), data.seed, data.shuffle)

    def batch(self, update: int) -> list[int]:
        """Return which of `examples.train` an update takes, counted from 0.

        The last one may have fewer than the others.
        """
        positions = batch_positions(update, self.config.engine.batch_size, self._num_positions, self.begun)
        return [self.order(position)[1] for position in positions]

    def position_at(self, done: int) -> int:
        batch_size = self.config.engine.batch_size
        served = batch_positions(done, batch_size, 0, self.begun).start
        return min(served, self._num_positions or served)

    def epochs_at(self, done: int) -> float:
        return self.position_at(done) / len(self.examples.train)

    @property
    def _num_positions(self) -> int:
        return self.order.num_positions(self.config.data.epochs)

    @property
    def required_bytes(self) -> int:
        is_lora = bool(self.config.engine.lora_rank)
        return self.config.checkpoint.room_bytes(self.model.num_parameters, is_lora=is_lora)

    def plan(self) -> list[tuple[str, str]]:
        config, model, counts = self.config, self.model, self.examples.train_counts
        rows, sequences = config.rows_name, [each for one in self.examples.train for each in one.sequences]
        tokens = sum(len(sequence.ids) for sequence in sequences)
        learned = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
        trained = f"LoRA of rank {config.engine.lora_rank}" if config.engine.lora_rank else "all weights"
        left_out = f", {counts.too_long} left out: too long" if counts.too_long else ""
        left_out += f", {counts.held_out} left out: they ask a held-out question" if counts.held_out else ""
        cut = f", {counts.truncated} cut off at {config.data.max_sequence_tokens} tokens" if counts.truncated else ""
        every = config.validates_every
        return [
            ("model", f"{model.family}, {count_text(model.num_parameters)} parameters, {model.path}"),
            ("trains", f"{trained}, {config.engine.backend} engine on {config.engine.device}, {config.engine.dtype}"),
            *(("chosen", choice) for choice in self.choices),
            *([("loss", self._loss_text())] if config.preference.loss != "sft" else []),
            ("data", f"{counts.kept} {rows} of {counts.read} rows from {as_written(config.data.path)}{left_out}{cut}"),
            (
                "tokens",
                f"{count_text(tokens)} an epoch, prompts included; the loss is on {count_text(learned)} of them",
            ),
            *(sample_row(what, text, self.examples.template) for what, text in self.samples),
            (
                "validation",
                f"{len(self.held_out)} {rows}, before training, every {every} updates and at the end"
                if every
                else "none",
            ),
            *([("ranks", self._ranks_text())] if config.engine.num_ranks > 1 else []),
            ("length", f"{self.num_updates} updates of {config.engine.batch_size} {rows}"),
            *(self.memory.rows(self.placement)[1:] if self.memory else [("memory", self._memory_text())]),
            ("disk", f"{size_text(self.required_bytes)} for checkpoints"),
            *(("notice", notice) for notice in self.notices),
        ]

    def _loss_text(self) -> str:
        preference = self.config.preference
        if preference.loss == "reward":
            return "reward (Bradley-Terry), of a classification head with one output"
        against = "the policy before training, asked once" if preference.needs_reference else "none"
        return f"{preference.loss}, beta {preference.resolved_beta:g}, reference: {against}"

    def _ranks_text(self) -> str:
        threads = self.config.threads_per_rank
        each = f"{threads} CPU thread{'s' * (threads > 1)} each"
        return f"{self.config.engine.num_ranks} that train together as {self.layout}, {each}"

    def _memory_text(self) -> str:
        """Return what can be said of a family whose formulas are not known."""
        engine = self.config.engine
        held = self.layout.held_bytes(self.model.num_parameters, trains_all=not engine.lora_rank)
        what = "weights" if engine.lora_rank else "weights, gradients and moments"
        each = ", on each rank" if engine.num_ranks > 1 else ""
        return f"{size_text(held)} for {what} + activations of {engine.max_tokens_per_microbatch} tokens{each}"


def check_run(config: SftConfig, begun: Progress = Progress(), *, problems: Problems | None = None) -> Preflight:
    """Check a configuration against the machine or the cluster, the model folder and the data.

    Args:
        config: of the run.
        begun: where it continues from.
        problems: other mistakes, which are reported together with those of the configuration.

    Raises:
        UserError: what is wrong, with what to do; mistakes of several sections together.
    """
    data, known = fill_known_data(config.data)
    config, problems = replace(config, data=data), problems or Problems()
    with problems.collected():
        reserves = require_backend("offbeat.launcher", config.cluster.launcher).reserves
        if not reserves:
            check_processes({"engine.num_ranks": config.engine.num_ranks})
            require_backend("offbeat.engine", config.engine.backend)
    check_settings(config, problems)
    with problems.collected():
        check_data_paths(config.data)
    if has_hub_model(config):
        problems.raise_all()  # nothing is fetched for a run that cannot begin
    hub = HubModels()
    with problems.collected():
        config, hub = fetch_models(config)
        doing("checking the model", as_written(config.model.path))
        model = inspect_model(config.model.path)
        check_model(model.path)
    if problems.texts:
        with problems.collected():
            check_rows(config.data)
    problems.raise_all()
    doing("loading the tokenizer", as_written(config.model.path))
    tokenizer = load_tokenizer(model.path, config.model.trust_remote_code)
    doing("reading the data", as_written(config.data.path))
    examples = load_examples(config, tokenizer)
    _check_examples(model, (*examples.train, *examples.eval))
    # From here on torch is imported, which takes seconds: the mistakes above are reported at once.
    doing("checking engine and devices", f"{examples.train_counts.read} training rows are read")
    backend: TrainBackend = load_backend("offbeat.engine", config.engine.backend)
    _check_head(config, backend)
    _check_device(config, is_elsewhere=reserves)
    view = find_view(config.cluster, config.devices)
    written, config = config, settle_format(config, view)
    if config.validates_every and not examples.eval:
        raise ConfigError(NEEDS_HELD_OUT)
    num_updates = _count_updates(config, len(examples.train), begun)
    config.profile.check([RoleName("trainer", rank) for rank in range(config.engine.num_ranks)], num_updates)
    wanted = assume_budget(config).train_engine(num_updates)
    check_schedule(wanted, length_keys=LENGTH_KEYS)
    if reserves:
        wanted = replace(wanted, device="auto")  # the devices are the nodes', and this machine need have none
    layout = backend.plan(wanted, config.engine.num_ranks)
    if layout.copied_bytes:
        raise ConfigError("engine.options.peer_copies: sft-app replaces no single rank, so leave it false")
    _check_lengths(layout, (*examples.train, *examples.eval))
    placement = request_resources(config, view).place(view)
    batch_tokens = _largest_batch(config, examples.train)
    config, choices = settle_budget(config, layout, placement, batch_tokens, _longest_example(examples.train))
    return Preflight(
        config=config,
        written=hub.name_in(replace(written, engine=written.engine.settle_budget_as(config.engine))),
        hub=hub,
        model=model,
        examples=examples,
        held_out=examples.eval[: config.eval.max_sequences or None],
        num_updates=num_updates,
        placement=placement,
        layout=layout,
        memory=_estimate_memory(config, layout, placement, batch_tokens),
        choices=(*known, *choices),
        notices=(*examples.notices, *_batch_notice(config, len(examples.train)), *tracker_notices(config.log)),
        samples=_samples(config, examples, tokenizer),
        begun=begun,
    )


def _batch_notice(config: SftConfig, num_rows: int) -> list[str]:
    if config.engine.batch_size <= num_rows:
        return []
    more = "" if config.data.epochs == 1 else ", and continues with those of the next epoch"
    return [
        f"engine.batch_size = {config.engine.batch_size}: an epoch has {num_rows} to train on, so that an update takes "
        f"all of them{more}; lower it for more updates"
    ]


def _samples(config: SftConfig, examples: ExampleSet, tokenizer: Tokenizer) -> tuple[tuple[str, str], ...]:
    sequences = examples.train[0].sequences
    names = ("a chosen sequence", "its rejected one") if len(sequences) > 1 else ("a sequence",)
    ids = [each.ids[:-1] if config.head == "score" else each.ids for each in sequences]
    return tuple(zip(names, (tokenizer.decode(each, skip_special_tokens=False) for each in ids), strict=True))


def _largest_batch(config: SftConfig, examples: Sequence[Example]) -> int:
    """Tokens of one step at most: few short sequences do not fill a micro-batch."""
    return sum(sorted(map(_num_tokens, examples))[-config.engine.batch_size :])


def _longest_example(examples: Sequence[Example]) -> int:
    """Tokens of the longest sequence, or pair: it shares the computation of its prompt within one micro-batch."""
    return max(map(_num_tokens, examples))


def _num_tokens(example: Example) -> int:
    return sum(len(each.ids) for each in example.all)


def _estimate_memory(
    config: SftConfig, layout: TrainLayout, placement: Placement, batch_tokens: int
) -> RunMemory | None:
    try:
        return estimate_memory(config, layout, placement, batch_tokens)
    except ModelError:
        return None  # an estimate is a help: a family without one can be trained all the same


def settle_budget(
    config: SftConfig,
    layout: TrainLayout | None,
    placement: Placement,
    batch_tokens: int | None = None,
    longest_tokens: int = 0,
) -> tuple[SftConfig, tuple[str, ...]]:
    """Settle `engine.max_tokens_per_microbatch = 0` and `engine.activation_checkpointing = "auto"`.

    Args:
        config: with all else that memory depends on settled.
        layout: None where the backend cannot be asked.
        placement: of the ranks.
        batch_tokens: of one step at most; None where the data are not read.
        longest_tokens: of one row; 0 where the data are not read.

    Returns:
        The configuration, and the choice with its reason; none where nothing was open.
    """

    def held(engine: EngineConfig) -> int:
        memory = estimate_memory(replace(config, engine=engine), layout, placement, batch_tokens)
        return memory.roles["trainer"].num_bytes

    engine, said = choose_budget(
        config.engine,
        {"trainer": held},
        placement.accelerator_bytes("trainer"),
        on_cpu=placement.is_on_cpu("trainer"),
        longest_tokens=longest_tokens,
        step_tokens=batch_tokens or 0,
    )
    return replace(config, engine=engine), said


def assume_budget(config: SftConfig) -> SftConfig:
    """Return the configuration for what does not depend on the choice, such as the layout of the ranks."""
    return replace(config, engine=config.engine.settle_budget(recomputes=True))


def batch_positions(
    update: int,
    batch_size: int,
    num_positions: int,
    begun: Progress = Progress(),
) -> range:
    """Positions in the data of an update, counted from 0; the data end at `num_positions`, 0 for never.

    Batches go on over the end of an epoch, so that only the run's last one can be smaller than the others.
    """
    first = begun.position + (update - begun.updates) * batch_size
    end = first + batch_size
    return range(first, min(end, num_positions) if num_positions else end)


def _check_device(config: SftConfig, *, is_elsewhere: bool) -> None:
    if is_elsewhere:
        check_kinds(config.devices)
        return
    from offbeat_device import rank_device  # imports torch: late, after the cheap mistakes

    rank_device(config.engine.device, 0, config.engine.num_ranks, setting="engine.device")


def settle_format(config: SftConfig, view: ClusterView) -> SftConfig:
    """Fill in `engine.dtype = "auto"`, by the kind of device that trains. Imports torch where only torch can tell."""
    engine = config.engine
    if engine.dtype != "auto":
        return config
    kind = view.kind(engine.device)
    if not view.reserves and engine.device != "cpu":
        from offbeat_device import accelerator_kind

        kind = accelerator_kind(engine.device)
    return replace(config, engine=replace(engine, dtype="bfloat16" if kind else "float32"))


_ON_ONE_MACHINE: Final = {"tensor_parallel": "engine.num_ranks"}
_ON_A_CLUSTER: Final = {"num_replicas": "engine.num_ranks", "cpus_per_rank": "cluster.trainer_threads"}


def request_resources(config: SftConfig, view: ClusterView) -> ResourceRequest:
    """Ranks that share matrices lie on one node. All ranks do where the launcher has this machine alone."""
    engine, kind, sharing = config.engine, view.kind(config.engine.device), sharing_ranks(config)
    cpus = view.cpus_per_rank(kind, config.cluster.trainer_threads)
    if load_backend("offbeat.launcher", config.cluster.launcher).reserves:
        width = engine.options.get("tensor_parallel", 1)
        group = RankGroup(
            role="trainer",
            num_replicas=engine.num_ranks // sharing,
            tensor_parallel=width,
            pipeline_parallel=sharing // width,
            accelerator=kind,
            named_device=view.named_device(engine.device),
            cpus_per_rank=cpus,
            keys=_ON_A_CLUSTER,
            scales={"num_replicas": sharing},
        )
    else:
        group = RankGroup(
            role="trainer",
            tensor_parallel=engine.num_ranks,
            width_multiple=sharing,
            accelerator=kind,
            named_device=view.named_device(engine.device),
            cpus_per_rank=cpus,
            keys=_ON_ONE_MACHINE,
        )
    return cluster_request(config.cluster, view, config.devices, [group])


def _check_head(config: SftConfig, backend: TrainBackend) -> None:
    if config.head not in getattr(backend, "heads", ("tokens",)):
        raise ConfigError(
            f"preference.loss = {config.preference.loss!r} trains a {config.head} head, and engine.backend = "
            f"{config.engine.backend!r} has none: take an engine that has one, such as torch"
        )
    idle = ["entropy_gradient", *(["temperature", "head_dtype"] if config.head == "score" else [])]
    if given := [name for name in idle if name in config.engine.options]:
        raise ConfigError(
            f"engine.options.{given[0]} has no effect with preference.loss = {config.preference.loss!r}: leave it out"
        )


def _check_examples(model: ExaminedModel, examples: tuple[Example, ...]) -> None:
    sequences = [sequence for example in examples for sequence in example.all]
    longest = max(example.longest for example in examples)
    if model.max_positions and longest > model.max_positions:
        raise ConfigError(
            f"the longest sequence has {longest} tokens and {model.path} has {model.max_positions} positions: lower "
            "data.max_sequence_tokens to that"
        )
    highest = max(int(sequence.ids.max()) for sequence in sequences)
    if model.vocabulary and highest >= model.vocabulary:
        raise ModelError(
            f"{model.path}: its tokenizer gives the id {highest} and its embedding has {model.vocabulary} rows; take "
            "the tokenizer that belongs to the weights"
        )


def _check_lengths(layout: TrainLayout, examples: tuple[Example, ...]) -> None:
    """Refuse sequences that the trainer would refuse in the middle of the run."""
    longest, limit = max(example.longest for example in examples), layout.max_sequence_tokens
    if limit and longest > limit:
        raise ConfigError(
            f"the longest sequence has {longest} tokens and may have {limit}: {layout.max_sequence_reason}; lower "
            "data.max_sequence_tokens to that"
        )


def _count_updates(config: SftConfig, num_sequences: int, begun: Progress) -> int:
    left = max(config.data.epochs * num_sequences - begun.position, 0)
    by_data = begun.updates - (-left // config.engine.batch_size) if config.data.epochs else 0
    return min(limit for limit in (by_data, config.engine.max_updates) if limit)


_AXES: Final = ("tensor_parallel", "pipeline_parallel", "context_parallel")


def sharing_ranks(config: SftConfig) -> int:
    """Ranks that share one copy of the model's matrices, blocks and sequences."""
    sizes = {axis: config.engine.options.get(axis, 1) for axis in _AXES}
    if not all(isinstance(size, int) and size >= 1 for size in sizes.values()):
        raise ConfigError(f"engine.options {sizes} must be whole numbers of ranks, 1 or more")
    shared: int = prod(sizes.values())
    num_ranks = config.engine.num_ranks
    if num_ranks % shared:
        text = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        raise ConfigError(f"engine.num_ranks = {num_ranks} must be a multiple of {text} (engine.options)")
    return shared


def estimate_memory(
    config: SftConfig,
    layout: TrainLayout | None = None,
    placement: Placement | None = None,
    batch_tokens: int | None = None,
) -> RunMemory:
    """Estimate from the model's config.json.

    Args:
        config: of the run.
        layout: None where the backend cannot be asked: as FSDP shards.
        placement: of the ranks; None where they have no places.
        batch_tokens: of one step at most, which bounds a micro-batch; None where the data are not read.
    """
    shape, width = read_shape(config.model.path), sharing_ranks(config)
    layout = layout or TrainLayout(dp=config.engine.num_ranks // width, tp=width, zero_stage=3)
    on_cpu = placement.is_on_cpu("trainer") if placement else config.engine.device == "cpu"
    limit = config.engine.max_tokens_per_microbatch
    engine = replace(config.engine, max_tokens_per_microbatch=min(limit, batch_tokens or limit))
    estimate = train_memory(engine, layout, shape, on_cpu=on_cpu).estimate(shape)
    return RunMemory(shape, {"trainer": estimate}, {"trainer": train_advice(config.engine, estimate)})
