"""A checkpoint that is there to be read: whole, and of the model that trains."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from offbeat_engine_megatron._checkpoint_format import (
    ADAPTER_FILE,
    ADAPTER_FOLDER,
    DEVICE_RNG,
    FOLDER,
    HOST_RNG,
    find_moments,
    read_state,
)
from offbeat_engine_megatron._lora import Adapters, peft_name
from offbeat_engine_megatron._optimizer_state import MOMENTS
from offbeat_engine_megatron._shape import read_model
from offbeat_engine_megatron._tensor_files import TensorFolder
from offbeat_engine_megatron._weights import HeldWeights
from offbeat_mesh import Device
from offbeat_types import ModelError

if TYPE_CHECKING:
    from offbeat_engine_megatron._plan import Plan


class SavedCheckpoint:
    """Headers and shapes of all files of a checkpoint, checked. A context manager.

    Args:
        folder: of the checkpoint.
        plan: of the engine.
        trained: what the optimizer updates.
        adapters: with LoRA.

    Attributes:
        weights: values of what is trained, under the names of their slots.
        moments: Adam's, with the moment's name before that of the slot.
        steps_taken: updates done.
        steps_refused: updates refused.

    Raises:
        ModelError: the folder is not a whole checkpoint of this model.
    """

    def __init__(self, folder: Path, plan: "Plan", trained: Sequence[HeldWeights], adapters: Adapters | None) -> None:
        state = read_state(folder)
        self._folder, self._writers = folder / FOLDER, sorted(state["parts"])
        self.steps_taken: int = state["steps_taken"]
        self.steps_refused: int = state["steps_refused"]
        _check_adapters(folder, adapters)
        _, theirs = read_model(str(folder))
        if theirs != plan.shape:
            raise ModelError(f"{folder} is a checkpoint of another model: {theirs}; this engine trains {plan.shape}")
        pieces = find_moments(state)
        shapes = {f"{name}.{slot.name}": slot.shape for held in trained for slot in held.slots for name in MOMENTS}
        unknown = sorted(pieces.keys() - shapes.keys())
        if unknown:
            raise ModelError(f"{folder}: the optimizer's state is of another model: it knows {unknown[0]}")
        with ExitStack() as opened:
            files = TensorFolder(folder) if adapters is None else _open_adapter(folder / ADAPTER_FOLDER, adapters)
            self.weights = opened.enter_context(files)
            for held in trained:
                held.check(self.weights)
            self.moments = opened.enter_context(TensorFolder(self._folder, pieces))
            for name in pieces:
                self.moments.check(name, shapes[name])
            self._opened = opened.pop_all()

    def restore_random_state(self, device: Device, rank: int, num_ranks: int) -> None:
        """Set the random state of this rank, or the first writer's when another number of ranks has written."""
        file = self._writers[rank if len(self._writers) == num_ranks else 0]
        with TensorFolder(self._folder, {name: [((), file, name)] for name in (HOST_RNG, DEVICE_RNG)}) as tensors:
            torch.set_rng_state(tensors.read(HOST_RNG, ()))
            state = tensors.read(DEVICE_RNG, ())
        if state.shape == device.rng_state().shape:  # another kind of device goes on from its own
            device.set_rng_state(state)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()


def _check_adapters(folder: Path, adapters: Adapters | None) -> None:
    has_adapters = (folder / ADAPTER_FOLDER).is_dir()
    if has_adapters and adapters is None:
        raise ModelError(f"{folder} was saved with LoRA; resume with the same lora_rank")
    if adapters is not None and not has_adapters:
        raise ModelError(f"{folder} holds no adapters, yet lora_rank is set; resume with lora_rank = 0")


def _open_adapter(folder: Path, adapters: Adapters) -> TensorFolder:
    """Adapters under the names of their slots.

    Raises:
        ModelError: they are not those of this model, or of another rank.
    """
    slots = {peft_name(slot.name): slot for slot in adapters.held.slots}
    with TensorFolder(folder) as found:
        wrong = sorted(found.names ^ set(slots))
        if wrong:
            raise ModelError(f"{folder}: adapters differ from the model's, first at {wrong[0]}; use the same lora_rank")
        try:
            for name, slot in slots.items():
                found.check(name, slot.shape)
        except ModelError as error:
            raise ModelError(f"{error}; use the same lora_rank") from None
    return TensorFolder(folder, {slot.name: [((), ADAPTER_FILE, name)] for name, slot in slots.items()})
