"""Experts that a trainer holds as stacks, under the names that the model's folder has for them one by one.

transformers loads the experts of a layer into two tensors, `experts.gate_up_proj` [experts, gate and up rows, in] and
`experts.down_proj` [experts, out, in], and saves each matrix by itself again.

Source: transformers 5.19.0, transformers/conversion_mapping.py ("qwen2_moe", which "qwen3_moe" and others share).
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from offbeat_rollout_vllm._folders import ModelFolder
from offbeat_types import WeightProof, WeightStream

if TYPE_CHECKING:
    from torch import Tensor

PARTS: Final = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}


class UnstackedStream:
    """A `WeightStream` whose stacks of experts are handed out matrix by matrix; the proof is of the stacks.

    Args:
        stream: under the folder's names, or those of transformers in memory.
        folder: of the model. A stack that it has itself stays one.
    """

    def __init__(self, stream: WeightStream, folder: ModelFolder) -> None:
        self._stream, self._folder, self.version = stream, folder, stream.version
        self._num_experts: dict[str, int] = {}

    def __iter__(self) -> "Iterator[tuple[str, Any]]":
        """Yield (name, tensor)."""
        import torch

        for name, value in self._stream:
            if len(value.shape) != 3 or not _parts(name) or self._folder.shape_of(name) is not None:
                yield name, value
                continue
            self._num_experts[name] = len(value)
            for expert, matrix in enumerate(torch.as_tensor(value)):
                names = _names(name, expert)
                yield from zip(names, matrix.chunk(len(names)), strict=True)

    def prove(self, read: "Callable[[str], Tensor]") -> WeightProof:
        """See `WeightStream.prove`; `read` knows matrices alone."""
        import torch

        def read_whole(name: str) -> "Tensor":
            if name not in self._num_experts:
                return read(name)
            experts = range(self._num_experts[name])
            return torch.stack([torch.cat([read(part) for part in _names(name, expert)]) for expert in experts])

        return self._stream.prove(read_whole)


def _parts(name: str) -> tuple[str, ...]:
    """The matrices of an expert that a stack of this name holds; none: it is no stack."""
    return next((parts for suffix, parts in PARTS.items() if name.endswith(suffix)), ())


def _names(name: str, expert: int) -> list[str]:
    """What the folder calls an expert's matrices in a stack."""
    return [f"{name.rpartition('.')[0]}.{expert}.{part}.weight" for part in _parts(name)]
