"""The configuration in the planner's words, and the nodes it is asked about."""

from typing import Final

from grpo_async_app._config.resolved import resolve
from grpo_async_app._config.reward_model import reward_model_of
from grpo_async_app._config.sections import GrpoConfig
from offbeat_actors import cluster_request
from offbeat_actors import find_view as find_nodes
from offbeat_core import ConfigError
from offbeat_placement import ClusterView, Placement, RankGroup, ResourceRequest

_TRAINER_KEYS: Final = {"num_replicas": "engine.num_ranks", "cpus_per_rank": "cluster.trainer_threads"}
_ROLLOUT_KEYS: Final = {
    "num_replicas": "rollout.num_engines",
    "cpus_per_rank": "cluster.rollout_threads",
    "tensor_parallel": "rollout.tensor_parallel",
    "shares_devices_with": "cluster.colocate",
    "spans_nodes": "cluster.spans_nodes",
}
_TEACHER_KEYS: Final = {
    "num_replicas": "teacher.num_replicas",
    "cpus_per_rank": "cluster.rollout_threads",
    "tensor_parallel": "teacher.tensor_parallel",
    "shares_devices_with": "teacher.colocate",
}
_REWARD_MODEL_KEYS: Final = {
    "num_replicas": "reward.reward_model.num_replicas",
    "cpus_per_rank": "cluster.rollout_threads",
}


def find_view(config: GrpoConfig, words: str = "") -> ClusterView:
    """Return the nodes to plan for: see `offbeat_actors.find_view`."""
    return find_nodes(config.cluster, config.devices, words, widths=device_widths(config))


def device_widths(config: GrpoConfig) -> dict[str, int]:
    """Return how many devices a role takes from its numbered one on, by the setting of the device; others take one."""
    return {"rollout.device": config.rollout.tensor_parallel, "teacher.device": config.teacher.tensor_parallel}


def place_run(config: GrpoConfig, view: ClusterView) -> Placement:
    """Plan where every rank goes, or say what would make it fit. Pure."""
    return request_resources(config, view).place(view)


def request_resources(config: GrpoConfig, view: ClusterView) -> ResourceRequest:
    return cluster_request(config.cluster, view, config.devices, _groups(config, view))


def _groups(config: GrpoConfig, view: ClusterView) -> list[RankGroup]:
    cluster, rollout, width = config.cluster, config.rollout, trainer_width(config)
    trains_on, samples_on = view.kind(config.engine.device), view.kind(rollout.device)
    is_colocated = cluster.colocate and bool(trains_on) and trains_on == samples_on
    groups = [
        RankGroup(
            role="trainer",
            num_replicas=config.engine.num_ranks // width,
            tensor_parallel=width,
            accelerator=trains_on,
            named_device=view.named_device(config.engine.device),
            cpus_per_rank=view.cpus_per_rank(trains_on, cluster.trainer_threads),
            keys=_TRAINER_KEYS,
            scales={"num_replicas": width},
        ),
        RankGroup(
            role="rollout",
            num_replicas=rollout.num_engines,
            tensor_parallel=rollout.tensor_parallel,
            accelerator=samples_on,
            named_device=view.named_device(rollout.device),
            cpus_per_rank=view.cpus_per_rank(samples_on, cluster.rollout_threads / rollout.tensor_parallel),
            shares_devices_with="trainer" if is_colocated else "",
            spans_nodes=cluster.spans_nodes and bool(samples_on),
            process_per_replica=True,
            keys=_ROLLOUT_KEYS,
            scales={"cpus_per_rank": rollout.tensor_parallel},
        ),
    ]
    if config.teacher.is_set:
        groups.append(_teacher_group(config, view, samples_on))
    if (model := reward_model_of(config.reward)) is not None:
        kind = view.kind(model.device)
        groups.append(
            RankGroup(
                role="reward_model",
                num_replicas=model.num_replicas,
                accelerator=kind,
                cpus_per_rank=view.cpus_per_rank(kind, cluster.rollout_threads),
                process_per_replica=True,
                keys=_REWARD_MODEL_KEYS,
            )
        )
    cpus = view.cpus_per_rank("", 1)
    on_call = {"environment": len(resolve(config).environments), "agent": int(bool(config.agent.command))}
    for role, number in on_call.items():
        if number:
            groups.append(
                RankGroup(role=role, num_replicas=number, accelerator="", cpus_per_rank=cpus, process_per_replica=True)
            )
    return groups


def _teacher_group(config: GrpoConfig, view: ClusterView, samples_on: str) -> RankGroup:
    """Replicas of the teacher: apart, or on the accelerators of the engines that sample."""
    teacher = config.teacher
    kind = view.kind(teacher.device)
    if teacher.colocate and view.reserves and not (kind and kind == samples_on):
        raise ConfigError(
            f"teacher.colocate = true: the teacher computes on {kind or 'CPUs'} and the rollout engines on "
            f"{samples_on or 'CPUs'}, which share nothing; set it to false, or teacher.device as rollout.device"
        )
    return RankGroup(
        role="teacher",
        num_replicas=teacher.num_replicas,
        tensor_parallel=teacher.tensor_parallel,
        accelerator=kind,
        cpus_per_rank=view.cpus_per_rank(kind, config.cluster.rollout_threads / teacher.tensor_parallel),
        shares_devices_with="rollout" if teacher.colocate and kind else "",
        process_per_replica=True,
        keys=_TEACHER_KEYS,
        scales={"cpus_per_rank": teacher.tensor_parallel},
    )


def trainer_width(config: GrpoConfig) -> int:
    """Trainer ranks that share each matrix: every engine that has such groups calls the option `tensor_parallel`."""
    width, num_ranks = config.engine.options.get("tensor_parallel", 1), config.engine.num_ranks
    if not isinstance(width, int) or width < 1 or num_ranks % width:
        raise ConfigError(
            f"engine.num_ranks = {num_ranks} must be a multiple of engine.options.tensor_parallel = {width!r}"
        )
    return width
