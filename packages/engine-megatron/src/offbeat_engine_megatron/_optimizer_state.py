"""What an optimizer knows of each parameter, wherever megatron-core keeps it: Adam's moments, and float32 weights.

A parameter in bfloat16 is a rounded copy; what is updated, and goes into checkpoints, is its float32 main parameter.
The distributed optimizer holds both cut over the ranks that share the parameter.
"""

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat_engine_megatron._optimizer import ClippedOptimizer

_MAIN: Final = "main"


class OptimizerState:
    """The state of each parameter, whole on each rank.

    Args:
        optimizer: whose it is.
    """

    def __init__(self, optimizer: ClippedOptimizer) -> None:
        self._each = optimizer.each
        self._owners = {id(parameter): each for each in self._each for parameter in _parameters_of(each)}
        self._last: tuple[Any, str, Tensor] | None = None

    @torch.no_grad()
    def moment(self, name: str, parameter: Any) -> Tensor:
        """One of `MOMENTS`, of the parameter's shape, float32. All ranks that share the parameter's state call this."""
        if self._last is None or self._last[0] is not parameter or self._last[1] != name:
            self._last = (parameter, name, self._collect(parameter, name))
        return self._last[2]  # queries, keys and values of one parameter are asked for one after the other

    @torch.no_grad()
    def put_moment(self, name: str, parameter: Any, values: Tensor) -> None:
        """Set this rank's part of a moment from the whole of it."""
        found = self._find(parameter)
        if found is not None:
            inner, main, start, stop = found
            inner.state[main][name] = values.reshape(-1)[start:stop].clone().view_as(main)

    def weights(self, parameter: Any) -> Tensor:
        """What is trained, of the parameter's shape: itself, or the float32 values that it is rounded from.

        All ranks that share the parameter's state call this.
        """
        if self._is_copy(parameter):
            return self.moment(_MAIN, parameter)
        whole: Tensor = parameter.detach()
        return whole

    @torch.no_grad()
    def put_weights(self, parameter: Any, values: Tensor) -> None:
        """Set a parameter, and this rank's part of the float32 values behind it.

        Args:
            parameter: trained or frozen.
            values: float32, of its shape.
        """
        parameter.copy_(values)
        found = self._find(parameter) if self._is_copy(parameter) else None
        if found is not None:
            _, main, start, stop = found
            main.copy_(values.reshape(-1)[start:stop].view_as(main))

    def count_steps(self, steps_taken: int) -> None:
        """Set Adam's own count, a tensor for each parameter: it is counted up in place."""
        for each in self._each:
            for main in each.get_parameters():
                each.optimizer.state[main]["step"] = torch.tensor(float(steps_taken))

    def _is_copy(self, parameter: Any) -> bool:
        return parameter.dtype != torch.float32 and id(parameter) in self._owners

    def _collect(self, parameter: Any, name: str) -> Tensor:
        whole = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        found = self._find(parameter)
        if found is not None:
            inner, main, start, stop = found
            part = main if name == _MAIN else inner.state.get(main, {}).get(name)
            if part is not None:  # no moments yet before the first step
                whole.view(-1)[start:stop] = part.reshape(-1)
        owner = self._owners[id(parameter)]
        if hasattr(owner, "buffers"):  # the distributed optimizer: each rank has had a part
            dist.all_reduce(whole, group=owner.data_parallel_group)
        return whole

    def _find(self, parameter: Any) -> tuple[Any, Any, int, int] | None:
        """The inner optimizer, its parameter, and which elements of ours that is; None where others hold all of it."""
        owner = self._owners[id(parameter)]
        if not hasattr(owner, "buffers"):
            main = parameter if parameter.dtype == torch.float32 else parameter.main_param
            return owner.optimizer, main, 0, parameter.numel()
        if parameter not in owner.model_param_group_index_map:
            return None
        group, order = owner.model_param_group_index_map[parameter]
        span = owner._get_model_param_range_map(parameter)["param"]
        return owner.optimizer, owner.optimizer.param_groups[group]["params"][order], span.start, span.end


def _parameters_of(optimizer: Any) -> list[Any]:
    """Parameters of the model that one of megatron-core's optimizers updates: not the copies that it holds."""
    if hasattr(optimizer, "buffers"):  # the distributed optimizer
        return [parameter for buffer in optimizer.buffers for parameter in buffer.params]
    if hasattr(optimizer, "float16_groups"):
        groups = (*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups)
        return [parameter for group in groups for parameter in group]
    return list(optimizer.get_parameters())
