"""AdamW with a schedule, clipping, and the right to refuse a step."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offbeat_core import TrainEngineConfig, learning_rate_at
from offbeat_training._trainer_state import MOMENTS


class ClippedAdamW:
    """AdamW over named parameters, float32 throughout.

    Args:
        parameters: trained parameters by Hugging Face name; weight decay applies to matrices only.
        config: the schedule, betas, decay and clipping.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: TrainEngineConfig) -> None:
        self.parameters = dict(parameters)
        self.config = config
        self.steps_taken = 0
        matrices = [p for p in self.parameters.values() if p.ndim >= 2]
        others = [p for p in self.parameters.values() if p.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return learning_rate_at(self.steps_taken, self.config)

    def grad_norm(self, names: Collection[str] | None = None) -> float:
        """L2 norm over the gradients of `names`, or all; may be infinite or NaN. 0 when there is none."""
        grads = [
            parameter.grad
            for name, parameter in self.parameters.items()
            if parameter.grad is not None and (names is None or name in names)
        ]
        return float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0

    def first_not_finite(self) -> str:
        """Name of the first parameter whose gradient holds an infinity or NaN; empty when there is none."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                return name
        return ""

    def step(self, grad_norm: float) -> None:
        """Clip from `grad_norm` to the configured norm, and update."""
        grads = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        clip_gradients(grads, grad_norm, self.config.max_grad_norm)
        for group in self._adam.param_groups:
            group["lr"] = self.learning_rate
        self._adam.step()
        self.steps_taken += 1

    def clear(self) -> None:
        """Drop all gradients."""
        self._adam.zero_grad(set_to_none=True)

    def state_of(self, name: str) -> dict[str, Tensor]:
        """`step` and moments of one parameter; empty when it is not trained or never had a gradient."""
        parameter = self.parameters.get(name)
        return dict(self._adam.state[parameter]) if parameter is not None and parameter in self._adam.state else {}

    def moments(self) -> list[Tensor]:
        """Return all moments there are."""
        return [state[name] for state in self._adam.state.values() for name in MOMENTS]

    def load_state(self, states: Mapping[str, Mapping[str, Tensor]], steps_taken: int) -> None:
        """Take what `state_of` gave of each parameter, on the parameter's device."""
        self.steps_taken = steps_taken
        self._adam.state.clear()
        for name, parameter in self.parameters.items():
            if states.get(name):
                self._adam.state[parameter] = dict(states[name])


def clip_gradients(grads: Sequence[Tensor], grad_norm: float, limit: float) -> None:
    """Scale gradients in place, so that a norm above the limit becomes the limit.

    Args:
        grads: of this rank, which may have none.
        grad_norm: L2, of the gradients of all ranks.
        limit: of the norm; 0 for none.
    """
    if grads and limit and grad_norm > limit:
        torch._foreach_mul_(list(grads), limit / grad_norm)
