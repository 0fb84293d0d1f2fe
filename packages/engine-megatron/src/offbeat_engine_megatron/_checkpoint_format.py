"""How a checkpoint lies in its folder: a Hugging Face model, and beside it what training needs to go on.

config.json, model*.safetensors, tokenizer   plain transformers loads the folder
mtp*.safetensors                             layers of multi-token prediction, which transformers does not look at
adapter/                                     with LoRA: the adapters in PEFT's form; the weights above are merged
trainer/optimizer*.safetensors               Adam's moments, whole tensors: "exp_avg.NAME" and "exp_avg_sq.NAME"
trainer/engine.json                          format, updates done and refused, and which file holds which moments

All tensors are float32; of weights in bfloat16 these are the values that they are rounded from. Whole tensors under
Hugging Face names, so that any layout reads what any other has written; the format is that of
offbeat-engine-torch, and either engine goes on from what the other has saved. megatron-core's own checkpoints are not
used: with torch's Adam they lose the count of steps when the layout changes, and after loading all parameters share one
step tensor, which Adam then counts up once for each of them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from offbeat_engine_megatron._optimizer_state import MOMENTS
from offbeat_engine_megatron._tensor_files import Box, PlannedFile
from offbeat_types import ModelError

FORMAT: Final = 2
FOLDER: Final = "trainer"
STATE_FILE: Final = "engine.json"
ADAPTER_FOLDER: Final = "adapter"
ADAPTER_FILE: Final = "adapter_model.safetensors"
ADAPTER_SETTINGS: Final = "adapter_config.json"
MTP_LAYERS: Final = "num_nextn_predict_layers"
"""In config.json, as DeepSeek-V3 and others say it."""

HOST_RNG, DEVICE_RNG = "rng.host", "rng.device"
GENERATION_CONFIG: Final = "generation_config.json"


def describe_state(files: Sequence[PlannedFile], steps_taken: int, steps_refused: int) -> dict[str, Any]:
    """What engine.json says.

    Args:
        files: of the checkpoint, those of the optimizer's state with their folder.
        steps_taken: updates done.
        steps_refused: updates refused.
    """
    stem = f"{MOMENTS[0]}."
    parts = {
        file.name.removeprefix(f"{FOLDER}/"): {
            spec.name.removeprefix(stem): {"step": float(steps_taken), "box": [[0, size] for size in spec.shape]}
            for spec in file.specs
            if spec.name.startswith(stem)
        }
        for file in files
        if file.name.startswith(f"{FOLDER}/")
    }
    return {"format": FORMAT, "steps_taken": steps_taken, "steps_refused": steps_refused, "parts": parts}


def read_state(folder: Path) -> dict[str, Any]:
    """What engine.json of a checkpoint says.

    Raises:
        ModelError: it is not there, or of another format.
    """
    path = folder / FOLDER / STATE_FILE
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read ({error}): the folder is not a checkpoint that `save` finished"
        ) from error
    if state.get("format") != FORMAT or not {"steps_taken", "steps_refused", "parts"} <= state.keys():
        raise ModelError(
            f"{path} must have format {FORMAT}: got {state.get('format')}; it was written by another version or engine"
        )
    return state


def find_moments(state: dict[str, Any]) -> dict[str, list[tuple[Box, str, str]]]:
    """Under "exp_avg.NAME" and the like the pieces of each moment: (box, file's name, name in the file)."""
    found: dict[str, list[tuple[Box, str, str]]] = {}
    for file, parts in state["parts"].items():
        for name, part in parts.items():
            box = [(start, stop) for start, stop in part["box"]]
            for stored in (f"{moment}.{name}" for moment in MOMENTS):
                found.setdefault(stored, []).append((box, file, stored))
    return found
