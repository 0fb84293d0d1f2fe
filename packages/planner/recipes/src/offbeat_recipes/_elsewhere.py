"""Checks that can be made here for a trainer that would run in another place."""

import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from offbeat_core import (
    BackendError,
    ModelError,
    TrainEngineConfig,
    TrainLayout,
    check_schedule,
    load_backend,
    user_path,
)

NOT_LOOKED_AT: Final = ("not looked at", "model weights, data and devices: they are on the cluster")
"""Row of a plan."""

_NO_TENSORS: Final = struct.pack("<Q", 2) + b"{}"
"""A safetensors file."""


def layout_elsewhere(config: TrainEngineConfig, backend: str, num_ranks: int) -> TrainLayout | None:
    """Return how the ranks of a trainer would share the model; None where backend or model are not here to be asked.

    Args:
        config: of the engine; its devices need not be here. Where data that are not here end the run, its `total_steps`
            is 0, and the run is assumed to be as long as its schedule needs.
        backend: its name.
        num_ranks: that train together.

    Raises:
        ConfigError: they cannot share the model that way, or the run ends before its warm-up does.
    """
    if not config.total_steps:
        config = replace(config, total_steps=config.warmup_steps + 1)
    check_schedule(config, length_keys=("engine.max_updates",))
    try:
        with _planned_folder(config.model_path) as folder:
            wanted = replace(config, device="cpu", model_path=folder)
            found: TrainLayout = load_backend("offbeat.engine", backend).plan(wanted, num_ranks)
    except (BackendError, ModelError):
        return None
    return found


@contextmanager
def _planned_folder(path: str) -> Iterator[str]:
    """The model's folder; where there is its config.json alone, one beside weights that a plan does not read."""
    folder = user_path(path)
    if not (folder / "config.json").is_file() or next(folder.glob("*.safetensors"), None):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="offbeat-plan-") as temporary:
        shutil.copyfile(folder / "config.json", Path(temporary, "config.json"))
        Path(temporary, "model.safetensors").write_bytes(_NO_TENSORS)
        yield temporary


def layout_row(layout: TrainLayout | None, backend: str) -> tuple[str, str]:
    """Row of a plan: how the ranks share the model, or that it is unknown.

    Args:
        layout: of `layout_elsewhere`.
        backend: that was asked.
    """
    unknown = f"of {backend}, which cannot be asked here: memory is estimated as if it were FSDP's"
    return ("layout", unknown if layout is None else str(layout))
