"""What travels from the trainer to the engines, and how, settled before anything starts."""

from dataclasses import dataclass, replace

from grpo_async_app._config.sections import GrpoConfig
from offbeat_placement import Placement
from offbeat_types import ConfigError, load_backend


@dataclass(frozen=True, kw_only=True)
class LoraSync:
    """What every sync brings.

    Args:
        what: "merged" weights, or the "adapter" alone.
        why: in words; empty where the policy has no adapters.
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
    """The configuration with what `choose_lora_sync` has chosen: roles are told, and choose nothing."""
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


def check_transport(config: GrpoConfig, placement: Placement) -> None:
    """Refuse a transport that does not reach every engine from where it is placed.

    Raises:
        ConfigError: with the engine that it does not reach.
    """
    transport, ranks = config.rollout.weight_transport, placement.plan.ranks
    sender = next(rank for rank in ranks if rank.role == "trainer")
    receivers = [rank for rank in ranks if rank.role == "rollout"]
    if transport in ("shared-memory", "cuda-ipc"):
        for rank in receivers:
            if rank.node != sender.node:
                raise ConfigError(
                    f'rollout.weight_transport = "{transport}" reaches the trainer\'s machine alone, and an engine is '
                    f'on {rank.node}, the trainer on {sender.node}: set it to "auto"'
                )
    if transport != "cuda-ipc":
        return
    names = {config.engine.device, config.rollout.device}
    is_same = all(rank.device == sender.device for rank in receivers)
    if not is_same or (sender.device is None and (len(names) > 1 or not config.engine.device.startswith("cuda"))):
        raise ConfigError(
            'rollout.weight_transport = "cuda-ipc" needs trainer and engines on one and the same CUDA device: set '
            'engine.device and rollout.device to it, or weight_transport = "auto"'
        )
