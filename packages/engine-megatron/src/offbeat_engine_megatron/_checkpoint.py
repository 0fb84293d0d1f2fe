"""Writes and reads checkpoints: a Hugging Face folder, and beside it what training needs to go on.

config.json, model*.safetensors, tokenizer   plain transformers loads the folder
trainer/optimizer*.safetensors               Adam's moments, whole tensors: "exp_avg.NAME" and "exp_avg_sq.NAME"
trainer/engine.json                          format, updates done and refused

Whole tensors under Hugging Face names, so that any layout reads what any other has written. megatron-core's own
checkpoints are not used: with torch's Adam they lose the count of steps when the layout changes, and after loading
all parameters share one step tensor, which Adam then counts up once for each of them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat_engine_megatron._optimizer import ClippedOptimizer
from offbeat_engine_megatron._shape import ModelShape, read_model
from offbeat_engine_megatron._weights import HeldWeights, sync_folder, write_tensors
from offbeat_types import ModelError

FORMAT: Final = 1
FOLDER: Final = "trainer"
MOMENTS: Final = ("exp_avg", "exp_avg_sq")


def save_state(
    folder: Path, held: HeldWeights, optimizer: ClippedOptimizer, steps_refused: int, *, leader: bool
) -> None:
    """Write optimizer and counts beside the weights. All ranks gather, the leader writes."""
    tensors = _gather(held, Moments(optimizer))
    if not leader:
        for _ in tensors:
            pass
        return
    trainer = folder / FOLDER
    trainer.mkdir(exist_ok=True)
    write_tensors(trainer, "optimizer", tensors)
    counts = {"format": FORMAT, "steps_taken": optimizer.steps_taken, "steps_refused": steps_refused}
    (trainer / "engine.json").write_text(json.dumps(counts, indent=2) + "\n")
    sync_folder(trainer)
    sync_folder(folder)


def load_state(folder: Path, shape: ModelShape, held: HeldWeights, optimizer: ClippedOptimizer) -> int:
    """Read weights, optimizer and counts; how many steps had been refused.

    Raises:
        ModelError: the folder is not a whole checkpoint of this model.
    """
    counts = _read_counts(folder / FOLDER / "engine.json")
    _, theirs = read_model(str(folder))
    if theirs != shape:
        raise ModelError(f"{folder} is a checkpoint of another model: {theirs}; this engine trains {shape}")
    held.read(folder)
    moments = Moments(optimizer)
    for name in MOMENTS:
        held.read_values(
            folder / FOLDER,
            f"{name}.",
            lambda parameter, values, name=name: moments.put(parameter, name, values),  # type: ignore[misc]
        )
    optimizer.steps_taken = counts["steps_taken"]
    moments.count_steps(counts["steps_taken"])
    return counts["steps_refused"]


def _read_counts(path: Path) -> dict[str, int]:
    try:
        counts: dict[str, int] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read ({error}): the folder is not a checkpoint that `save` finished"
        ) from error
    if counts.get("format") != FORMAT or not {"steps_taken", "steps_refused"} <= counts.keys():
        raise ModelError(f"{path} must have format {FORMAT}: got {counts}; it was written by another version or engine")
    return counts


def _gather(held: HeldWeights, moments: "Moments") -> Iterator[tuple[str, Tensor]]:
    for name in MOMENTS:
        for tensor_name, tensor in held.gather(lambda parameter, name=name: moments.whole(parameter, name)):  # type: ignore[misc]
            yield f"{name}.{tensor_name}", tensor


class Moments:
    """Adam's moments by parameter, whole on each rank, wherever megatron-core keeps their parts.

    Args:
        optimizer: whose they are.
    """

    def __init__(self, optimizer: ClippedOptimizer) -> None:
        self._each = getattr(optimizer.megatron, "chained_optimizers", [optimizer.megatron])
        self._owners = {
            id(parameter): each
            for each in self._each
            for parameter in (
                [held for buffer in each.buffers for held in buffer.params]
                if hasattr(each, "buffers")
                else each.get_parameters()
            )
        }
        self._last: tuple[Any, str, Tensor] | None = None

    @torch.no_grad()
    def whole(self, parameter: Any, name: str) -> Tensor:
        """One moment, of the parameter's shape. All ranks that share the optimizer's state of it call this."""
        if self._last is None or self._last[0] is not parameter or self._last[1] != name:
            self._last = (parameter, name, self._collect(parameter, name))
        return self._last[2]  # queries, keys and values of one parameter are asked for one after the other

    @torch.no_grad()
    def put(self, parameter: Any, name: str, values: Tensor) -> None:
        """Set this rank's part of a moment from the whole of it."""
        found = self._find(parameter)
        if found is not None:
            inner, main, start, stop = found
            inner.state[main][name] = values.reshape(-1)[start:stop].clone().view_as(main)

    def count_steps(self, steps_taken: int) -> None:
        """Set Adam's own count, a tensor for each parameter: it is counted up in place."""
        for each in self._each:
            for main in each.get_parameters():
                each.optimizer.state[main]["step"] = torch.tensor(float(steps_taken))

    def _collect(self, parameter: Any, name: str) -> Tensor:
        whole = torch.zeros_like(parameter, requires_grad=False)
        found = self._find(parameter)
        if found is not None:
            inner, main, start, stop = found
            if name in inner.state.get(main, {}):  # nothing yet before the first step
                whole.view(-1)[start:stop] = inner.state[main][name].reshape(-1)
        owner = self._owners[id(parameter)]
        if hasattr(owner, "buffers"):  # the distributed optimizer: each rank has had a part
            dist.all_reduce(whole, group=owner.data_parallel_group)
        return whole

    def _find(self, parameter: Any) -> tuple[Any, Any, int, int] | None:
        """The inner optimizer, its parameter, and which elements of ours that is; None where others hold all of it."""
        owner = self._owners[id(parameter)]
        if not hasattr(owner, "buffers"):
            return owner.optimizer, parameter, 0, parameter.numel()
        if parameter not in owner.model_param_group_index_map:
            return None
        group, order = owner.model_param_group_index_map[parameter]
        span = owner._get_model_param_range_map(parameter)["param"]
        return owner.optimizer, owner.optimizer.param_groups[group]["params"][order], span.start, span.end
