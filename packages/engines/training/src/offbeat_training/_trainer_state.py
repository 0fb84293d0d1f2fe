"""Layout of a checkpoint in its folder: a Hugging Face model, and beside it what training needs to resume.

config.json, model*.safetensors, tokenizer   the weights, adapters merged; plain transformers loads the folder
mtp*.safetensors                             layers of multi-token prediction, which transformers does not look at
adapter/                                     with LoRA: the adapters in PEFT's format
trainer/optimizer*.safetensors               Adam's moments, "exp_avg.NAME" and "exp_avg_sq.NAME", or Muon's,
                                             "momentum_buffer.NAME", and random states
trainer/engine.json                          format, updates done and refused, and which box of each moment lies where
*.xxh3                                       digest of the file beside it, made while that was written

Names are Hugging Face's and boxes those of whole tensors, so that any engine on any number of ranks reads what any
other has written. All tensors are float32; of weights in bfloat16 these are the values that they are rounded from.
Format 1, of one process, held whole moments in trainer/optimizer.safetensors as "adam.exp_avg.NAME"; it is still read.

megatron-core's own checkpoints are not used: with torch's Adam they lose the count of steps when the layout
changes, and after loading all parameters share one step tensor, which Adam then counts up once for each of them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor

from offbeat_core import DIGEST_SUFFIX, ModelError, describe_damage, digest_file, digest_of, write_digest
from offbeat_device import Device
from offbeat_training._lora import ADAPTER_FOLDER
from offbeat_training._tensor_files import Box, TensorFolder, whole_box

FORMAT: Final = 2
TRAINER_FOLDER: Final = "trainer"
STATE_FILE: Final = "trainer/engine.json"
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_FORMAT_1_FILE: Final = "optimizer.safetensors"
_HOST_RNG, _DEVICE_RNG = "rng.host", "rng.device"

Parts = Mapping[str, Mapping[str, Any]]
"""File's name to parameter's name to {"step", "box"}: which moments lie in it; "moments" names others than Adam's."""


def random_state(device: Device) -> dict[str, Tensor]:
    """Random state of this process, as it lies in a file of the optimizer."""
    return {_HOST_RNG: torch.get_rng_state(), _DEVICE_RNG: device.rng_state()}


def restore_random_state(states: Mapping[str, Tensor], device: Device) -> None:
    """Set what `random_state` has returned; another kind of device continues from its own."""
    torch.set_rng_state(states[_HOST_RNG].clone())
    if states[_DEVICE_RNG].shape == device.rng_state().shape:
        device.set_rng_state(states[_DEVICE_RNG].clone())


def describe_part(step: float, box: Box, moments: Sequence[str] = MOMENTS) -> dict[str, Any]:
    """Return what engine.json says of the moments of a parameter that lie in one file."""
    return {"step": step, "box": box} | ({} if tuple(moments) == MOMENTS else {"moments": list(moments)})


def write_state(folder: Path, steps_taken: int, steps_refused: int, parts: Parts) -> None:
    """Write engine.json.

    Args:
        folder: of the checkpoint.
        steps_taken: updates done.
        steps_refused: updates refused.
        parts: which moments lie in which file.
    """
    state = {"format": FORMAT, "steps_taken": steps_taken, "steps_refused": steps_refused, "parts": parts}
    (folder / STATE_FILE).write_text(json.dumps(state) + "\n")
    write_digest(folder / STATE_FILE, digest_file(folder / STATE_FILE))


def find_damage(folder: Path, rank: int, num_ranks: int) -> str:
    """Compare the files of a checkpoint with the digests that were made while they were written.

    Each file is read by one rank. A checkpoint of an older version has no digests.

    Args:
        folder: of the checkpoint.
        rank: this one, in [0, num_ranks).
        num_ranks: how many load the checkpoint.

    Returns:
        What has changed in this rank's share of the files; empty where nothing has.
    """
    folders = (folder, folder / TRAINER_FOLDER, folder / ADAPTER_FOLDER)
    files = sorted(path.with_suffix("") for each in folders for path in each.glob(f"*{DIGEST_SUFFIX}"))
    for path in files[rank::num_ranks]:
        if damage := describe_damage(path, digest_of(path)):
            return f"{folder} is damaged: {path.relative_to(folder)} {damage}; take an older checkpoint"
    return ""


class TrainerState:
    """Contents of a checkpoint beside the weights. A context manager, in which the moments can be read.

    Args:
        folder: of the checkpoint.

    Attributes:
        steps_taken: updates done.
        steps_refused: updates refused.
        moments: as "exp_avg.NAME".

    Raises:
        ModelError: the folder is not a checkpoint; on entering, it is not whole.
    """

    def __init__(self, folder: Path) -> None:
        state = _read_state(folder)
        self.steps_taken: int = state["steps_taken"]
        self.steps_refused: int = state["steps_refused"]
        self._folder, self._state = folder / TRAINER_FOLDER, state

    def __enter__(self) -> Self:
        is_first = self._state["format"] != FORMAT
        parts: Parts = self._format_1_parts() if is_first else self._state["parts"]
        self._files, prefix = sorted(parts), "adam." if is_first else ""
        self._steps: dict[str, float] = {}
        self._moments: dict[str, tuple[str, ...]] = {}
        found: dict[str, list[tuple[Box, str, str]]] = {}
        for file, held in parts.items():
            for name, part in held.items():
                box = tuple((int(start), int(stop)) for start, stop in part["box"])
                self._steps[name] = part["step"]
                self._moments[name] = tuple(part.get("moments", MOMENTS))
                for moment in self._moments[name]:
                    found.setdefault(f"{moment}.{name}", []).append((box, file, f"{prefix}{moment}.{name}"))
        self.moments = TensorFolder(self._folder, found, self._files)
        self._names = list(found)
        return self

    def check(
        self, shapes: Mapping[str, Sequence[int]], moments_of: Callable[[str], Sequence[str]] = lambda _: MOMENTS
    ) -> None:
        """Raise ModelError unless the moments are of parameters of these names and shapes, and of this optimizer."""
        unknown = sorted(self._steps.keys() - shapes.keys())
        if unknown:
            raise ModelError(
                f"{self._folder.parent}: optimizer state is of another model: it knows {unknown[0]}, the model does not"
            )
        for name, found in self._moments.items():
            if found != (wanted := tuple(moments_of(name))):
                has, needs = " and ".join(found), " and ".join(wanted)
                raise ModelError(
                    f"{self._folder.parent}: optimizer state is of another optimizer: of {name} it has {has}, and "
                    f"{needs} must be there; set option optimizer to the one that wrote it, or start from its weights "
                    "with model_path"
                )
        for name in self._names:
            self.moments.check(name, tuple(shapes[name.partition(".")[2]]))

    def step(self, name: str) -> float | None:
        """Updates that Adam has counted of a parameter; None for one that never had a gradient."""
        return self._steps.get(name)

    def restore_random_state(self, device: Device, rank: int, num_ranks: int) -> None:
        """Set the random state of this rank, or the first writer's when another number of ranks has written."""
        file = self._files[rank if len(self._files) == num_ranks else 0]
        with TensorFolder(self._folder, {name: [((), file, name)] for name in (_HOST_RNG, _DEVICE_RNG)}) as tensors:
            restore_random_state({name: tensors.read(name, ()) for name in (_HOST_RNG, _DEVICE_RNG)}, device)

    def _format_1_parts(self) -> Parts:
        file = self._folder / _FORMAT_1_FILE
        if not file.is_file():
            raise ModelError(f"{self._folder} is not whole: {_FORMAT_1_FILE} is missing; take another")
        with TensorFolder(self._folder) as tensors:
            steps = {name.removeprefix("adam.step."): name for name in tensors.names if name.startswith("adam.step.")}
            found = {
                name: describe_part(float(tensors.read(key, ())), whole_box(tensors.shape(f"adam.{MOMENTS[0]}.{name}")))
                for name, key in steps.items()
            }
        return {_FORMAT_1_FILE: found}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.moments.__exit__(kind, error, trace)


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} is not a checkpoint that `save` finished: {error}; take an older one") from error
    if state.get("format") not in (1, FORMAT):
        raise ModelError(
            f"{folder}: checkpoint formats 1 to {FORMAT} are read, got {state.get('format')}; use the version that "
            "wrote it"
        )
    if not {"steps_taken", "steps_refused"} <= state.keys() or (state["format"] == FORMAT and "parts" not in state):
        raise ModelError(f"{folder}: {STATE_FILE} is not what `save` writes; take an older one")
    return state
