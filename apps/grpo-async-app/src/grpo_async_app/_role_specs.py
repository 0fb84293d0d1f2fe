"""What each role of a run is started with."""

from pathlib import Path

from grpo_async_app._config import GrpoConfig
from offbeat_actors import RoleSpec, available_cpus, split_threads
from offbeat_types import TracePlan


class RoleSpecs:
    """Makes the spec of each role.

    Args:
        config: of the run.
        model_path: folder that trainer and engines start from.
        log_folder: takes one log file per role; traces go beside it.
        has_images: prompts have some.
    """

    def __init__(self, config: GrpoConfig, model_path: str, log_folder: Path, *, has_images: bool = False) -> None:
        self._config, self._model_path, self._log_folder = config, model_path, log_folder
        self._has_images = has_images
        self._threads = plan_threads(config)

    def trainer(self, socket_path: str, num_updates: int, checkpoint: Path | None) -> RoleSpec:
        """Rank 0 of the trainer; the others differ by their number.

        Args:
            socket_path: where engines on its machine fetch weights.
            num_updates: of the whole run, for the learning rate's schedule.
            checkpoint: folder it goes on from.
        """
        config = self._config
        return RoleSpec(
            name="trainer-0",
            target="grpo_async_app._roles.trainer:TrainerRole",
            kwargs={
                "backend": config.engine.backend,
                "config": config.train_engine(self._model_path, num_updates, self._threads["trainer"]),
                "algorithm": config.algorithm,
                "socket_path": socket_path,
                "rollout_dtype": config.rollout.dtype,
                "as_fp8": config.rollout.weight_format == "fp8",
                "bucket_bytes": config.rollout.sync_bucket_bytes,
                "checkpoint": str(checkpoint or ""),
                "stall_after_s": config.liveness.stall_after_s,
                "traces": [plan for role in config.traced_roles if (plan := self._trace_plan(role))],
            },
            num_threads=self._threads["trainer"],
            log_path=self._log_folder / "trainer-0.log",
        )

    def rollout(self, name: str) -> RoleSpec:
        """The rollout engine of this name."""
        return RoleSpec(
            name=name,
            target="grpo_async_app._roles.rollout:RolloutRole",
            kwargs={
                "backend": self._config.rollout.backend,
                "config": self._config.rollout_engine(self._model_path, self._threads["rollout"]),
                **self._config.endpoint(name),
                "trace": self._trace_plan(name),
                "trace_s": self._config.profile.rollout_s,
                "interrupts": self._config.async_.partial_rollout,
            },
            num_threads=self._threads["rollout"],
            log_path=self._log_folder / f"{name}.log",
        )

    def teacher(self, name: str) -> RoleSpec:
        """The replica of the teacher of this name."""
        return RoleSpec(
            name=name,
            target="grpo_async_app._roles.teacher:TeacherRole",
            kwargs={
                "backend": self._config.teacher.backend,
                "config": self._config.teacher_engine(self._threads["teacher"]),
                "temperature": self._config.rollout.temperature,
                "images": self._has_images,
            },
            num_threads=self._threads["teacher"],
            log_path=self._log_folder / f"{name}.log",
        )

    def environment(self) -> RoleSpec:
        """The process of all environments."""
        return RoleSpec(
            name="environment-0",
            target="grpo_async_app._roles.environment:EnvironmentRole",
            kwargs={"config": self._config.environment},
            num_threads=1,
            log_path=self._log_folder / "environment-0.log",
        )

    def _trace_plan(self, role: str) -> TracePlan | None:
        return self._config.profile.plan(role, self._log_folder.with_name("profile"))


def plan_threads(config: GrpoConfig) -> dict[str, int]:
    """CPU threads of a trainer rank, a rollout engine and a teacher; colocated, each kind has all CPUs in its turn."""
    trainers = [f"trainer-{rank}" for rank in range(config.engine.num_ranks)]
    rollouts = [f"rollout-{number}" for number in range(config.rollout.num_engines)]
    teachers = [f"teacher-{number}" for number in range(config.teacher.num_replicas if config.teacher.is_set else 0)]
    samplers = [*rollouts, *teachers]  # teachers score while engines sample
    turns = [trainers, samplers] if config.cluster.colocate else [[*trainers, *samplers]]
    shares: dict[str, int] = {}
    for roles in turns:
        shares |= split_threads(available_cpus(), dict.fromkeys(roles, 1.0))
    return {
        "trainer": config.cluster.trainer_threads or shares["trainer-0"],
        "rollout": config.cluster.rollout_threads or shares["rollout-0"],
        "teacher": config.cluster.rollout_threads or shares.get("teacher-0", 1),
    }
