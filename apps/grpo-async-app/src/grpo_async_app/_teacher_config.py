"""Section `teacher`: a model whose log-probabilities of the policy's own samples are learned from."""

from dataclasses import dataclass
from typing import Any

from offbeat_types import ConfigError, RolloutEngineConfig, setting


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """Section `teacher`: the model that on-policy distillation learns from, served by replicas of its own."""

    path: str = setting("", "Hugging Face folder of the teacher, with the policy's tokenizer; empty: no teacher.")
    backend: str = setting("torch", "Rollout engine that serves it: torch (embedded), or another that scores.")
    num_replicas: int = setting(1, "Replicas side by side, each in a process of its own.", "replicas", ge=1, le=65536)
    device: str = setting("auto", "auto, cpu, or a device such as cuda:0.")
    dtype: str = setting("float32", "Number format of its weights.", choices=("float32", "bfloat16", "float16"))
    tensor_parallel: int = setting(1, "Devices that one replica is split over.", ge=1)
    colocate: bool = setting(
        False, "Replicas share the accelerators of the rollout engines, all of them loaded at once."
    )
    deadline_s: float = setting(600.0, "Longest time for the scores of one group, once a replica serves.", "s", gt=0)
    options: dict[str, Any] = setting({}, "Extras of the backend, checked against its own settings.")

    @property
    def is_set(self) -> bool:
        """Whether there is one."""
        return bool(self.path)

    def check(self, *, is_learned_from: bool) -> None:
        """Find what is wrong with these settings before anything starts.

        Args:
            is_learned_from: the algorithm wants a teacher.

        Raises:
            ConfigError: one of the two is there without the other, or a setting would have no effect.
        """
        if is_learned_from and not self.is_set:
            raise ConfigError(
                "algorithm.distillation_coefficient is above 0 and there is no teacher: set teacher.path to its folder"
            )
        if self.is_set and not is_learned_from:
            raise ConfigError(
                f"teacher.path = {self.path!r} has no effect while algorithm.distillation_coefficient is 0: set it to "
                "1, or leave the teacher out"
            )
        if not self.is_set and self != TeacherConfig():
            raise ConfigError("the section teacher has no effect without teacher.path: set it or leave the section out")

    def engine(self, max_model_len: int, num_running: int, num_threads: int, *, trust: bool) -> RolloutEngineConfig:
        """What the backend is given.

        Args:
            max_model_len: tokens of the longest prompt with its completion.
            num_running: continuations scored together at most.
            num_threads: of each replica; 0 leaves the choice to the launcher.
            trust: run code that comes with the model folder.
        """
        return RolloutEngineConfig(
            model_path=self.path,
            trust_remote_code=trust,
            device=self.device,
            dtype=self.dtype,
            tensor_parallel=self.tensor_parallel,
            max_running=num_running,
            max_model_len=max_model_len + 1,  # vLLM scores a prompt only when it can sample one token more
            num_threads=num_threads,
            options=self.options,
        )
