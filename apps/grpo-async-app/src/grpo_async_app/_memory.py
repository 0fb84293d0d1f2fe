"""Memory of one trainer rank and one rollout rank of a run, and what of it the accelerators have."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from grpo_async_app._config import GrpoConfig
from grpo_async_app._placement import Placement, trainer_width
from offbeat_cluster.placement import MemoryEstimate, ModelShape, RolloutMemory, TrainMemory
from offbeat_run import count_text, size_text
from offbeat_types import ModelError, TrainLayout

_NUMBER_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_HEAD_BYTES: Final = 64 * 2**20
"""Logits of a chunk in the default engine, whose chunks have 16 tokens at least."""


@dataclass(frozen=True)
class RunMemory:
    """Estimates of one rank of each role, for the default engines."""

    shape: ModelShape
    trainer: MemoryEstimate
    rollout: MemoryEstimate
    kv_bytes_per_token: float
    teacher: MemoryEstimate | None = None

    @property
    def roles(self) -> dict[str, MemoryEstimate]:
        """By role."""
        roles = {"trainer": self.trainer, "rollout": self.rollout}
        return {**roles, "teacher": self.teacher} if self.teacher else roles

    def rows(self, placement: Placement) -> list[tuple[str, str]]:
        """In words."""
        shape = self.shape
        model = f"{shape.family}, {count_text(shape.num_parameters)} parameters"
        if shape.num_vision_parameters:
            model += f", {count_text(shape.num_vision_parameters)} of them for vision"
        rows = [("parameters", model)]
        for role, estimate in self.roles.items():
            rows.append((f"{role} memory", f"{_parts_text(estimate)}{_of_text(estimate, placement, role)}"))
        return rows

    def notices(self, placement: Placement) -> list[str]:
        """Devices that hold too little."""
        advice = {
            "trainer": "more engine.num_ranks, engine.activation_checkpointing, or fewer max_tokens_per_microbatch",
            "rollout": "a larger rollout.tensor_parallel, or fewer rollout.max_running",
            "teacher": "a larger teacher.tensor_parallel, or teacher.colocate = false",
        }
        needs = {role: estimate.num_bytes for role, estimate in self.roles.items()}
        for group in reversed(placement.groups):  # the teacher's to the engines', and theirs to the trainer's
            if group.shares_devices_with:
                needs[group.shares_devices_with] += needs.pop(group.role)
        return [
            f"a {role} rank needs about {size_text(needed)} and its device has {size_text(has)}: {advice[role]}"
            for role, needed in needs.items()
            if (has := placement.accelerator_bytes(role)) and needed > has
        ]


def estimate_memory(config: GrpoConfig, layout: TrainLayout | None = None) -> RunMemory:
    """Estimate from the model's config.json.

    Args:
        config: of the run.
        layout: how the trainer's ranks share the model; None where its backend cannot be asked: as FSDP does.

    Raises:
        ModelError: it is not there, not readable, or of a family that is not known.
    """
    shape = _read_shape(config.model.path)
    engine, rollout, width = config.engine, config.rollout, trainer_width(config)
    layout = layout or TrainLayout(dp=engine.num_ranks // width, tp=width, zero_stage=3)
    trainer = TrainMemory(
        compute_bytes=_NUMBER_BYTES[engine.dtype],
        data_parallel=layout.dp * layout.cp,
        tensor_parallel=layout.tp,
        pipeline_parallel=layout.pp,
        zero_stage=layout.zero_stage,
        tokens=engine.max_tokens_per_microbatch // layout.cp,
        recomputes=engine.activation_checkpointing,
        keeps_reference=config.algorithm.needs_reference and not engine.lora_rank,
        lora_rank=engine.lora_rank,
        head_tokens=max(16, _HEAD_BYTES // (4 * shape.vocabulary)),
    )
    number_bytes = _NUMBER_BYTES[rollout.dtype]
    engines = RolloutMemory(
        weight_bytes=number_bytes,
        kv_bytes=number_bytes,
        tensor_parallel=rollout.tensor_parallel,
        max_running=rollout.max_running,
        max_model_len=rollout.max_model_len,
        sync_bytes=2 * rollout.sync_bucket_bytes,
    )
    return RunMemory(
        shape,
        trainer.estimate(shape),
        engines.estimate(shape),
        engines.kv_bytes_per_token(shape),
        _estimate_teacher(config) if config.teacher.is_set else None,
    )


def _estimate_teacher(config: GrpoConfig) -> MemoryEstimate:
    """Of one rank of a replica: the samples of one group are scored together."""
    number_bytes = _NUMBER_BYTES[config.teacher.dtype]
    return RolloutMemory(
        weight_bytes=number_bytes,
        kv_bytes=number_bytes,
        tensor_parallel=config.teacher.tensor_parallel,
        max_running=config.rollout.samples_per_prompt,
        max_model_len=config.rollout.max_model_len,
    ).estimate(_read_shape(config.teacher.path))


def _read_shape(folder: str) -> ModelShape:
    path = Path(folder).expanduser() / "config.json"
    try:
        return ModelShape.from_config(json.loads(path.read_text()))
    except FileNotFoundError:
        raise ModelError(f"no {path}") from None
    except ValueError as error:
        raise ModelError(f"{path} is corrupt: {error}; copy it again") from error


def _parts_text(estimate: MemoryEstimate) -> str:
    parts = " + ".join(f"{name} {size_text(size)}" for name, size in estimate.parts.items())
    return f"{size_text(estimate.num_bytes)} a rank: {parts}"


def _of_text(estimate: MemoryEstimate, placement: Placement, role: str) -> str:
    has = placement.accelerator_bytes(role)
    return f" (of {size_text(has)}, {estimate.num_bytes / has:.0%})" if has else ""
