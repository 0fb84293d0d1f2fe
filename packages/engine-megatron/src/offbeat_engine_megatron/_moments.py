"""Adam's moments by parameter, wherever megatron-core's optimizers keep them."""

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat_engine_megatron._optimizer import ClippedOptimizer

MOMENTS: Final = ("exp_avg", "exp_avg_sq")


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
