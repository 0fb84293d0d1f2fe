"""The specs of the roles that a fleet starts, and the CPU threads of each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Final

from grpo_async_app._config.reward_model import reward_model_of
from grpo_async_app._config.sections import GrpoConfig
from offbeat_actors import RoleSpec, available_cpus, split_threads
from offbeat_core import DroppedSettings, RoleName, load_backend
from offbeat_data import EnvironmentConfig

_LOG_BYTES: Final = 4 << 20
"""Longest beginning of a log that an environment or an agent writes, in each of thousands of episodes."""


class RoleSpecs:
    """Makes the spec of each role: its class, its arguments, its threads and its log.

    A new kind of role is a class in _roles and a start in `Fleet`, with a spec of `light` if it computes without torch:
    as `RoleOnCall` where it runs a user's code and restarts when it is called, in a `Pool` where several serve alike.
    One that no plan names runs on the driver's machine.

    Args:
        config: of the run; roles that compute with torch get it whole.
        model_path: folder that engines start from.
        log_folder: takes one log file per role; traces lie beside it.
        has_images: prompts have some.
    """

    def __init__(self, config: GrpoConfig, model_path: str, log_folder: Path, *, has_images: bool = False) -> None:
        self._config, self._model_path, self._log_folder = config, model_path, log_folder
        self._has_images, self._threads = has_images, plan_threads(config)
        self._shares_cpus = share_cpus(config, self._threads)

    def trainer(
        self, socket_paths: Sequence[str], num_updates: int, checkpoint: Path | None, *, is_replaced: bool = False
    ) -> RoleSpec:
        """Rank 0 of the trainer; the others differ by their number. `is_replaced`: a rank that dies is, alone."""
        start = {"model_path": self._model_path, "num_updates": num_updates, "checkpoint": str(checkpoint or "")}
        spec = self._spec(
            RoleName("trainer"), "TrainerRole", **start, socket_paths=socket_paths, trace_folder=self._trace_folder
        )
        return replace(spec, liveness_policy="replace") if is_replaced else spec

    def rollout(self, role: RoleName) -> RoleSpec:
        spec = self._spec(role, "RolloutRole", role=role, model_path=self._model_path, trace_folder=self._trace_folder)
        return _with_environment_of(self._config.rollout.backend, spec)

    def replica(self, role: RoleName) -> RoleSpec:
        """Return the spec of a teacher or a reward model."""
        if role.kind == "teacher":
            spec = self._spec(role, "TeacherRole", images=self._has_images)
            return _with_environment_of(self._config.teacher.backend, spec)
        return self._spec(role, "RewardModelRole")

    def reference(self, model_path: str) -> RoleSpec:
        """Return the spec of the model of transformers that a diagnosis compares with; it computes on the CPU."""
        spec = self._spec(RoleName("reference"), "ReferenceRole", model_path=model_path)
        return replace(spec, shares_cpus=True)

    def environment(self, index: int, settings: EnvironmentConfig) -> RoleSpec:
        return self.light(RoleName("environment", index), "EnvironmentRole", settings)

    def agent(self) -> RoleSpec:
        return self.light(RoleName("agent"), "AgentRole", self._config.agent)

    def light(self, role: RoleName, target: str, config: object) -> RoleSpec:
        """Return the spec of a role that computes without torch: it gets its own section alone."""
        return RoleSpec(
            role=role,
            target=f"grpo_async_app._roles.{role.kind}:{target}",
            kwargs={"config": config},
            num_threads=1,
            log_path=self._log_folder / f"{role}.log",
            max_log_bytes=_LOG_BYTES,
        )

    def _spec(self, name: RoleName, target: str, /, **kwargs: object) -> RoleSpec:
        num_threads = self._threads[name.kind]
        return RoleSpec(
            role=name,
            target=f"grpo_async_app._roles.{name.kind}:{target}",
            kwargs={"config": self._config, "num_threads": num_threads, **kwargs},
            num_threads=num_threads,
            shares_cpus=self._shares_cpus,
            log_path=self._log_folder / f"{name}.log",
        )

    @property
    def _trace_folder(self) -> str:
        return str(self._log_folder.with_name("profile"))


def _with_environment_of(backend: str, spec: RoleSpec) -> RoleSpec:
    """Return the spec of an engine's role, without settings of the environment that its backend refuses."""
    dropped: DroppedSettings = getattr(load_backend("offbeat.rollout", backend), "dropped_settings", {})
    return replace(spec, dropped_settings=dropped)


def plan_threads(config: GrpoConfig) -> dict[str, int]:
    """CPU threads of a trainer rank, a rollout engine and a teacher.

    Those that train share all CPUs, and so do those that sample: threads that wait do not spin, so the others
    have them. (Half of the CPUs each was 1.5 to 2 times slower: each kind waits for the other a part of the time.)
    """
    counts = _count_roles(config)
    trainers, rollouts, *others = ([str(RoleName(kind, index)) for index in range(n)] for kind, n in counts.items())
    shares: dict[str, int] = {}
    for roles in (trainers, [*rollouts, *chain(*others)]):  # scoring overlaps with sampling
        shares |= split_threads(available_cpus(), dict.fromkeys(roles, 1.0))
    return {
        "trainer": config.cluster.trainer_threads or shares["trainer-0"],
        "rollout": config.cluster.rollout_threads or shares["rollout-0"],
        "teacher": config.cluster.rollout_threads or shares.get("teacher-0", 1),
        "reward_model": config.cluster.rollout_threads or shares.get("reward_model-0", 1),
        "reference": config.cluster.trainer_threads or shares["trainer-0"],
    }


def share_cpus(config: GrpoConfig, threads: Mapping[str, int]) -> bool:
    """Return whether roles that compute at the same time have more threads than this machine has CPUs.

    Those that take turns on a device do not.
    """
    return not config.cluster.colocate and available_cpus() < sum(
        count * threads[kind] for kind, count in _count_roles(config).items() if count
    )


def _count_roles(config: GrpoConfig) -> dict[str, int]:
    """Processes that compute with torch, by kind."""
    model = reward_model_of(config.reward)
    return {
        "trainer": config.engine.num_ranks,
        "rollout": config.rollout.num_engines,
        "teacher": config.teacher.num_replicas if config.teacher.is_set else 0,
        "reward_model": model.num_replicas if model else 0,
    }
