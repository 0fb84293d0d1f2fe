"""A rank reads its part of a weight out of the arena, and not the whole."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear

from offbeat_rollout_vllm._workers import Arena


class ReadBytes(TorchDispatchMode):
    """Counts what is copied out of an arena."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena, self.num_bytes = arena, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.clone):
            source: Tensor = args[-1]
            self.num_bytes += source.nbytes if self._arena.holds(source) else 0
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [linear.ColumnParallelLinear, linear.RowParallelLinear], ids=["rows", "columns"])
@pytest.mark.parametrize("rank", [0, 1])
def test_vllms_loaders_copy_the_part_of_their_rank_alone(kind: Any, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 2)
    with set_current_vllm_config(VllmConfig()):
        layer = kind(8, 6, bias=False, params_dtype=torch.float32)
    arena = Arena.create(4096)
    try:
        whole = arena.tensor(64, "float32", (6, 8)).copy_(torch.arange(48.0).view(6, 8))
        with ReadBytes(arena) as read:
            layer.weight.weight_loader(layer.weight, whole)
        dim = 0 if kind is linear.ColumnParallelLinear else 1
        assert torch.equal(layer.weight, whole.chunk(2, dim)[rank])
        assert read.num_bytes == whole.nbytes / 2
    finally:
        arena.close()
