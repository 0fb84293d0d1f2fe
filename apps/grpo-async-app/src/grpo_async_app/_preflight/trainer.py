"""The trainer's layout: whether its backend can train this model with these settings on so many ranks, and how."""

from dataclasses import replace

from grpo_async_app._config.critic import load_critic_backend
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.budget import assume_budget
from offbeat_actors import check_kinds
from offbeat_core import ConfigError, TrainBackend, TrainLayout, check_schedule, load_backend
from offbeat_placement import ClusterView
from offbeat_run import LENGTH_KEYS


def plan_trainer(config: GrpoConfig, num_updates: int, view: ClusterView) -> TrainLayout:
    """Ask the trainer's backend whether so many ranks can train this model with these settings, and how."""
    config = assume_budget(config)
    config.profile.check(config.traced_roles, num_updates)
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
        _check_context(config, of_critic.plan(replace(critic, device=wanted.device), config.engine.num_ranks))
    backend: TrainBackend = load_backend("offbeat.engine", config.engine.backend)
    layout = backend.plan(wanted, config.engine.num_ranks)
    _check_context(config, layout)
    _check_healing(config, layout)
    return layout


def _check_context(config: GrpoConfig, layout: TrainLayout) -> None:
    """Refuse lengths that the trainer would refuse in the middle of the run.

    The limit itself is refused too: engines are given one token more, by which vLLM chooses the rotary frequencies of
    all requests.
    """
    longest, limit = config.rollout.max_model_len, layout.max_sequence_tokens
    if limit and longest >= limit:
        raise ConfigError(
            f"rollout.max_model_len = {longest} must be below {limit}: {layout.max_sequence_reason}; lower it"
        )


def _check_healing(config: GrpoConfig, layout: TrainLayout) -> None:
    """Refuse copies from which no rank could be replaced.

    Raises:
        ConfigError: with what to change.
    """
    hindrance = ""
    if config.algorithm.needs_critic:
        hindrance = "a critic (algorithm.advantage = gae), of whose state no copies are kept"
    elif config.cluster.colocate:
        hindrance = "engines that share their devices with the trainer (cluster.colocate)"
    if layout.copied_bytes and hindrance:
        raise ConfigError(
            "engine.options.peer_copies replaces a rank of the trainer that dies, but not beside "
            f"{hindrance}: set it to false"
        )


def check_devices(config: GrpoConfig, view: ClusterView) -> None:
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
