"""What travels from the trainer to the engines, and how, settled before anything starts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_async_app._config.sections import GrpoConfig
from offbeat_core import ConfigError, load_backend
from offbeat_placement import PlacedRank, Placement


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


def choose_transport(config: GrpoConfig, placement: Placement) -> str:
    """How weights travel from where the trainer is placed to where the engines are, and why: a line of the plan.

    Raises:
        ConfigError: the transport that is asked for does not reach every engine; with the first that it does not.
    """
    transport, ranks = config.rollout.weight_transport, placement.plan.ranks
    sender = next(rank for rank in ranks if rank.role == "trainer")
    receivers = [rank for rank in ranks if rank.role == "rollout"]
    elsewhere = next((rank for rank in receivers if rank.node != sender.node), None)
    if transport == "auto":
        if elsewhere is None:
            return "by shared memory: all engines are on the trainer's machine"
        return f"by TCP: an engine is on {elsewhere.node}, the trainer on {sender.node}"
    if transport in ("shared-memory", "cuda-ipc") and elsewhere is not None:
        raise ConfigError(
            f'rollout.weight_transport = "{transport}" reaches the trainer\'s machine alone, and an engine is '
            f'on {elsewhere.node}, the trainer on {sender.node}: set it to "auto"'
        )
    if transport == "cuda-ipc":
        _check_one_device(config, sender, receivers)
    elif transport == "nccl":
        _check_many_devices(config, sender, receivers)
    elif transport == "disk" and config.rollout.full_sync_every > 1:
        raise ConfigError(
            'rollout.weight_transport = "disk" writes all weights of every version: leave rollout.full_sync_every at '
            "1, or take another transport"
        )
    how = {
        "shared-memory": "by shared memory",
        "tcp": "by TCP",
        "cuda-ipc": "by CUDA IPC",
        "nccl": "by broadcasts of one group, from the trainer to all engines",
        "disk": f"through {config.rollout.weight_folder or 'the run folder'}, as safetensors files",
    }
    return f'{how[transport]}: rollout.weight_transport = "{transport}"'


def _check_one_device(config: GrpoConfig, sender: PlacedRank, receivers: Sequence[PlacedRank]) -> None:
    names = {config.engine.device, config.rollout.device}
    is_same = all(rank.device == sender.device for rank in receivers)
    if not is_same or (sender.device is None and (len(names) > 1 or not config.engine.device.startswith("cuda"))):
        raise ConfigError(
            'rollout.weight_transport = "cuda-ipc" needs trainer and engines on one and the same CUDA device: set '
            'engine.device and rollout.device to it, or weight_transport = "auto"'
        )


def _check_many_devices(config: GrpoConfig, sender: PlacedRank, receivers: Sequence[PlacedRank]) -> None:
    kinds = {name.partition(":")[0] for name in (config.engine.device, config.rollout.device)} - {"auto"}
    if len(kinds) > 1:
        raise ConfigError(
            'rollout.weight_transport = "nccl" needs trainer and engines on one kind of device: engine.device is '
            f'{config.engine.device}, rollout.device {config.rollout.device}; set weight_transport = "auto"'
        )
    places = [(rank.node, rank.device) for rank in (sender, *receivers) if rank.device is not None]
    if config.cluster.colocate or len(set(places)) < len(places):
        raise ConfigError(
            'rollout.weight_transport = "nccl" needs a device for the trainer and one for each engine, and some share '
            'theirs: set it to "cuda-ipc" or "auto"'
        )
