"""The part of a rehearsal that is always shrunk alike: the trainer, to a few ranks on a CPU."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from offbeat_core import BackendError, TrainEngineSettings, require_backend

EMBEDDED: Final = "torch"
"""The backend that is always here."""
MAX_ROLES: Final = 2
"""Ranks, engines, and ranks of one engine: with two, whatever waits for another does."""
REHEARSAL_BYTES: Final = 2**28
"""Room on the disk for a shrunken run."""

EngineT = TypeVar("EngineT", bound=TrainEngineSettings)


def installed_backend(kind: str, name: str) -> str:
    """Return the backend, or the embedded one where it, or the engine that it adapts, is not here.

    Args:
        kind: as of `load_backend`.
        name: of the backend.
    """
    try:
        require_backend(kind, name)
    except BackendError:
        return EMBEDDED
    return name


def stand_ins(wanted: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return texts on which backend has another in its place.

    Args:
        wanted: by key: the backend of the recipe, and the one taken.
    """
    return [
        f"{key}: {name} is not installed, {taken} takes its place"
        for key, (name, taken) in wanted.items()
        if name != taken
    ]


def takes_images(engine: TrainEngineSettings, backend: str) -> bool:
    """Return whether a trainer can be rehearsed with images: the embedded one shares no tower, others lack LoRA for it.

    Args:
        engine: section of the recipe.
        backend: of the rehearsal.
    """
    return engine.options.get("tensor_parallel", 1) == 1 if backend == EMBEDDED else engine.lora_rank == 0


def takes_experts(engine: TrainEngineSettings, backend: str) -> bool:
    """Return whether a trainer can be rehearsed with a mixture of experts; otherwise as `takes_images`."""
    return backend != EMBEDDED or engine.options.get("tensor_parallel", 1) == 1


def shrink_engine(engine: EngineT, *, wanted: str, taken: str, num_ranks: int, num_updates: int) -> EngineT:
    """Return a trainer's section made small.

    Args:
        engine: section with `backend`, `num_ranks` and `max_updates` beside the settings of any trainer.
        wanted: backend of the recipe.
        taken: backend of the rehearsal.
        num_ranks: of the rehearsal.
        num_updates: it ends after.
    """
    options = engine.options
    if taken != wanted:  # what means the same to every training engine
        options = {name: value for name, value in options.items() if name == "tensor_parallel"}
    changes: dict[str, Any] = {
        "backend": taken,
        "device": "cpu",
        "num_ranks": num_ranks,
        "max_updates": num_updates,
        "warmup_steps": min(engine.warmup_steps, 1),
        "max_tokens_per_microbatch": min(engine.max_tokens_per_microbatch or 64, 64),
        "lora_rank": min(engine.lora_rank, 4),
        "options": _shrink_axes(options, num_ranks),
    }
    return replace(engine, **changes)


def _shrink_axes(options: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """Return the first axis along which ranks share the model keeps as many as there are.

    The others get what is left.
    """
    shrunk, left = dict(options), num_ranks
    for axis in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
        if axis in shrunk:
            shrunk[axis] = min(shrunk[axis], left)
            left //= shrunk[axis]
    if "expert_parallel" in shrunk:
        shrunk["expert_parallel"] = min(shrunk["expert_parallel"], num_ranks // shrunk.get("pipeline_parallel", 1))
    for sizes in ("virtual_pipeline", "mtp_layers"):
        if sizes in shrunk:
            shrunk[sizes] = min(shrunk[sizes], 1)
    return shrunk
