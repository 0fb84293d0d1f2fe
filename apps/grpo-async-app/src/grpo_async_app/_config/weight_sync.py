"""The content of a sync, and its transport, settled before anything starts."""

from dataclasses import dataclass, replace

from grpo_async_app._config.sections import GrpoConfig
from offbeat_core import ConfigError, RoleName, installed_backends, load_backend
from offbeat_placement import Placement
from offbeat_weightsync import Endpoint, Route, transport_class


@dataclass(frozen=True, kw_only=True)
class LoraSync:
    """Content of every sync.

    Args:
        what: "merged" weights, or the "adapter" alone.
        why: the reason; empty where the policy has no adapters.
    """

    what: str
    why: str = ""

    def __str__(self) -> str:
        brought = "the adapter alone" if self.what == "adapter" else "merged weights"
        return f"each sync brings {brought}: {self.why}"


def choose_lora_sync(config: GrpoConfig) -> LoraSync:
    """Follow `rollout.lora_sync`, or choose where it is "auto".

    Raises:
        ConfigError: the adapter is wanted, and there is none, or the engine cannot sample with it.
    """
    wanted = config.rollout.lora_sync
    if not config.engine.lora_rank:
        if wanted == "adapter":
            raise ConfigError(
                'rollout.lora_sync = "adapter" needs a policy with adapters: set engine.lora_rank, or leave it "auto"'
            )
        return LoraSync(what="merged")
    if wanted == "merged":
        return LoraSync(what="merged", why='rollout.lora_sync = "merged"')
    obstacle = _obstacle(config)
    if obstacle and wanted == "adapter":
        raise ConfigError(f'rollout.lora_sync = "adapter": {obstacle}; set it to "merged"')
    if obstacle:
        return LoraSync(what="merged", why=obstacle)
    if config.rollout.full_sync_every > 1:
        raise ConfigError(
            "rollout.full_sync_every has no effect where adapters alone travel: leave it at 1, or set "
            'rollout.lora_sync = "merged"'
        )
    return LoraSync(what="adapter", why=f"rollout.backend = {config.rollout.backend!r} samples with adapters")


def settle_lora_sync(config: GrpoConfig) -> GrpoConfig:
    """Return the configuration with what `choose_lora_sync` has chosen: roles get it, and choose nothing."""
    return replace(config, rollout=replace(config.rollout, lora_sync=choose_lora_sync(config).what))


def _obstacle(config: GrpoConfig) -> str:
    """Why engines cannot be given adapters alone; empty where they can."""
    backend = config.rollout.backend
    if config.cluster.colocate and config.cluster.sleep_level == 2:
        return "with cluster.colocate and cluster.sleep_level = 2 engines give their weights back before every sync"
    refuses = getattr(load_backend("offbeat.rollout", backend), "refuses_adapters", None)
    if refuses is None:
        return f"rollout.backend = {backend!r} takes no adapters"
    return str(refuses(config.rollout_engine(config.model.path, 0), config.engine.lora_rank))


def choose_transport(config: GrpoConfig, placement: Placement) -> tuple[GrpoConfig, str]:
    """Choose how weights travel from where the trainer is placed to where the engines are.

    Returns:
        The configuration with `rollout.weight_transport` settled as far as it can be before the run; and the choice
        with its reason, a line of the plan.

    Raises:
        BackendError: there is no such transport.
        ConfigError: the transport that is asked for does not reach every engine; with the first that it does not.
    """
    wanted, route = config.rollout.weight_transport, _route(config, placement)
    if complaint := transport_class(wanted).complaint(route):
        raise ConfigError(f'rollout.weight_transport = "{wanted}" {complaint}')
    name = transport_class(wanted).settle(wanted, route)
    how = transport_class(name).describe(route)
    if name == wanted != "auto":
        how += f': rollout.weight_transport = "{name}"'
    return replace(config, rollout=replace(config.rollout, weight_transport=name)), how


def assign_ranks(config: GrpoConfig, placement: Placement) -> dict[str, tuple[int, ...]]:
    """Return for each engine, by name, the trainer ranks that send to it: one, or if they differ one for each device.

    Args:
        config: with `rollout.weight_transport` settled.
        placement: of the run.
    """
    route, width = _route(config, placement), config.rollout.tensor_parallel
    ranks = transport_class(config.rollout.weight_transport).assign(route)
    by_engine = (tuple(ranks[start : start + width]) for start in range(0, len(ranks), width))
    return {
        str(RoleName("rollout", index)): each if len(set(each)) > 1 else each[:1]
        for index, each in enumerate(by_engine)
    }


def _route(config: GrpoConfig, placement: Placement) -> Route:
    ranks, kinds = placement.plan.ranks, {group.role: group.accelerator for group in placement.groups}
    devices = {"trainer": config.engine.device, "rollout": config.rollout.device}
    places: dict[str, list[Endpoint]] = {
        role: [
            Endpoint(node=rank.node, device=device, index=rank.device, kind=kinds.get(role, ""))
            for rank in ranks
            if rank.role == role
        ]
        for role, device in devices.items()
    }
    backend = config.rollout.backend
    engine = load_backend("offbeat.rollout", backend) if backend in installed_backends("offbeat.rollout") else None
    loads = getattr(engine, "loads_on_device", False)
    # An adapter alone comes to the engine's own process, which computes on no device.
    by_workers = getattr(engine, "workers_receive", False) and choose_lora_sync(config).what == "merged"
    return Route(
        senders=places["trainer"],
        receivers=places["rollout"],
        engine_width=config.rollout.tensor_parallel,
        shares_devices=config.cluster.colocate,
        sends_changes=config.rollout.full_sync_every > 1,
        folder=config.rollout.weight_folder,
        # Blocks of FP8 have not been unpacked on a device yet.
        loads_on_device=(loads or by_workers) and config.rollout.weight_format == "dtype",
    )
