"""What can be asked here about a trainer that would run in another place."""

from dataclasses import replace
from typing import Final

from offbeat_types import BackendError, ModelError, TrainEngineConfig, TrainLayout, load_backend

NOT_LOOKED_AT: Final = ("not looked at", "model weights, data and devices: they are on the cluster")
"""Row of a plan."""


def layout_elsewhere(config: TrainEngineConfig, backend: str, num_ranks: int) -> TrainLayout | None:
    """How the ranks of a trainer would share the model; None where backend or model are not here to be asked.

    Args:
        config: of the engine; its devices need not be here. Where data that are not here end the run, its `total_steps`
            is 0, and as long a run is taken as its schedule needs.
        backend: its name.
        num_ranks: that train together.

    Raises:
        ConfigError: they cannot share the model that way.
    """
    if not config.total_steps:
        config = replace(config, total_steps=config.warmup_steps + 1)
    try:
        found: TrainLayout = load_backend("offbeat.engine", backend).plan(replace(config, device="cpu"), num_ranks)
    except (BackendError, ModelError):
        return None
    return found


def layout_row(layout: TrainLayout | None, backend: str) -> tuple[str, str]:
    """Row of a plan: how the ranks share the model, or that nobody could say.

    Args:
        layout: of `layout_elsewhere`.
        backend: that was asked.
    """
    unknown = f"of {backend}, which cannot be asked here: memory is told as if it were FSDP's"
    return ("layout", unknown if layout is None else str(layout))
