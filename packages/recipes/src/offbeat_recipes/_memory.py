"""Memory of one rank of each role of a run, and what of it the accelerators have."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from offbeat_placement import MemoryEstimate, ModelShape, TrainMemory
from offbeat_recipes._placement import Placement
from offbeat_run import count_text, size_text
from offbeat_types import ModelError, TrainEngineSettings, TrainLayout

NUMBER_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_HEAD_BYTES: Final = 64 * 2**20
"""Logits of a chunk in the default engine, whose chunks have 16 tokens at least."""


@dataclass(frozen=True)
class RunMemory:
    """Estimates of one rank of each role.

    Args:
        shape: of the model that is trained.
        roles: estimates by role.
        advice: by role, what to change where a device holds too little.
        limits: by role, bytes of its device that it allows itself; others take all of it.
    """

    shape: ModelShape
    roles: Mapping[str, MemoryEstimate]
    advice: Mapping[str, str]
    limits: Mapping[str, int] = field(default_factory=dict)

    def rows(self, placement: Placement | None = None) -> list[tuple[str, str]]:
        """In words."""
        shape = self.shape
        model = f"{shape.family}, {count_text(shape.num_parameters)} parameters"
        if shape.num_vision_parameters:
            model += f", {count_text(shape.num_vision_parameters)} of them for vision"
        rows = [("parameters", model)]
        for role, estimate in self.roles.items():
            of = _of_text(estimate, placement, role) if placement else ""
            rows.append((f"{role} memory", f"{_parts_text(estimate)}{of}"))
        return rows

    def notices(self, placement: Placement) -> list[str]:
        """Devices that hold too little. Roles that share the trainer's take turns with it: each is alone there."""
        needs = {role: estimate.num_bytes for role, estimate in self.roles.items()}
        limits = {role: self.limits.get(role) or placement.accelerator_bytes(role) for role in needs}
        for group in placement.groups:
            if (host := group.shares_devices_with) and host != "trainer":  # at the same time: the teacher of an engine
                needs[host] += needs.pop(group.role)
                limits[host] = placement.accelerator_bytes(host)
        return [
            f"a {role} rank needs about {size_text(needed)} and {_limit_text(limits[role], placement, role)}: "
            f"{self.advice[role]}"
            for role, needed in needs.items()
            if limits[role] and needed > limits[role]
        ]


def train_memory(
    engine: TrainEngineSettings, layout: TrainLayout, shape: ModelShape, *, keeps_reference: bool = False
) -> TrainMemory:
    """How a trainer keeps a model.

    Args:
        engine: its settings.
        layout: how its ranks share the model.
        shape: of the model.
        keeps_reference: a frozen copy of the first policy is held too, where all weights are trained.
    """
    return TrainMemory(
        weight_bytes=layout.weight_bytes,
        gradient_bytes=layout.gradient_bytes,
        optimizer_bytes=layout.optimizer_bytes,
        compute_bytes=NUMBER_BYTES[engine.dtype],
        data_parallel=layout.dp * layout.cp,
        tensor_parallel=layout.tp,
        pipeline_parallel=layout.pp,
        expert_parallel=layout.ep,
        zero_stage=layout.zero_stage,
        tokens=engine.max_tokens_per_microbatch // layout.cp,
        recomputes=engine.activation_checkpointing,
        keeps_reference=keeps_reference and not engine.lora_rank,
        lora_rank=engine.lora_rank,
        head_tokens=max(16, _HEAD_BYTES // (4 * shape.vocabulary)),
    )


def train_advice(engine: TrainEngineSettings, estimate: MemoryEstimate) -> str:
    """What to change where a rank of a trainer holds too much: what most of it is made of."""
    states = sum(estimate.parts.get(name, 0) for name in ("weights", "gradients", "optimizer", "reference"))
    if states > estimate.num_bytes - states:
        return "more engine.num_ranks" + ("" if engine.lora_rank else ", or adapters alone (engine.lora_rank)")
    checkpointing = "" if engine.activation_checkpointing else "engine.activation_checkpointing = true, or "
    return f"{checkpointing}fewer engine.max_tokens_per_microbatch"


def read_shape(folder: str) -> ModelShape:
    """Sizes of the model in a folder.

    Raises:
        ModelError: no config.json, not readable, or of a family that is not known.
    """
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


def _limit_text(limit: int, placement: Placement, role: str) -> str:
    has = placement.accelerator_bytes(role)
    if limit == has:
        return f"its device has {size_text(has)}"
    return f"may take {size_text(limit)} of the {size_text(has)} of its device"


def _of_text(estimate: MemoryEstimate, placement: Placement, role: str) -> str:
    has = placement.accelerator_bytes(role)
    return f" (of {size_text(has)}, {estimate.num_bytes / has:.0%})" if has else ""
