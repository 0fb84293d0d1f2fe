"""AdamW, and Muon beside it, with a schedule, clipping, and the right to refuse a step."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offbeat_core import TrainEngineConfig, learning_rate_at
from offbeat_device import StreamedMemory
from offbeat_training._optimizers.adamw import NarrowAdamW
from offbeat_training._optimizers.moments import HeldMoments, is_small
from offbeat_training._optimizers.muon import MUON_MOMENTS, Muon
from offbeat_training._tensor_files import Box, whole_box
from offbeat_training._trainer_state import MOMENTS


class ClippedAdamW:
    """AdamW over named parameters, computed in float32.

    Args:
        parameters: trained parameters by Hugging Face name; weight decay applies to matrices only.
        config: the schedule, betas, decay and clipping.
        moments: format in which moments are held: float32, bfloat16 or int8. Those of vectors and of small matrices
            (`is_small`) are float32 in any case.
        places: shape of the whole of each parameter, and the box of it that this rank has; None: all have the whole.
        fused: compile the update of narrower moments.
        muon: updates the parameters that it holds, which AdamW then leaves alone; made for the same step.
        stream: brings moments to the device for the update of their parameter alone; None: they stay there.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: TrainEngineConfig,
        *,
        moments: str = "float32",
        places: Mapping[str, tuple[Sequence[int], Box]] | None = None,
        fused: bool = False,
        muon: Muon | None = None,
        stream: StreamedMemory | None = None,
    ) -> None:
        self._stream = stream
        self.parameters = dict(parameters)
        self.config = config
        self.steps_taken = 0
        places = places or {name: (p.shape, whole_box(p.shape)) for name, p in self.parameters.items()}
        left = {name: p for name, p in self.parameters.items() if muon is None or name not in muon.held.parameters}
        narrow = {name: p for name, p in left.items() if moments != "float32" and not is_small(places[name][0])}
        self._narrow = NarrowAdamW(HeldMoments(narrow, places, MOMENTS, moments, stream), config, fused=fused)
        self._muon = muon
        self._held = [self._narrow.held, *([muon.held] if muon else [])]
        plain = [parameter for name, parameter in left.items() if name not in narrow]
        matrices = [p for p in plain if p.ndim >= 2]
        others = [p for p in plain if p.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            groups,
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
        self._step_plain()
        self._narrow.step(self.learning_rate)
        if self._muon:
            self._muon.step(self.learning_rate)
        self.steps_taken += 1

    def _step_plain(self) -> None:
        """Update what torch's AdamW updates: all at once, or one parameter after the other, which is the same."""
        groups = self._adam.param_groups
        if self._stream is None:
            self._adam.step()
            return
        whole = [group["params"] for group in groups]
        names = {parameter: name for name, parameter in self.parameters.items()}
        order = [names[each] for parameters in whole for each in parameters if each.grad is not None]
        try:
            for name in self._stream.through(order, self._plain_memory):
                for group, parameters in zip(groups, whole, strict=True):
                    group["params"] = [each for each in parameters if each is self.parameters[name]]
                self._adam.step()
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

    def _plain_memory(self, name: str) -> list[Tensor]:
        state = self._adam.state.get(self.parameters[name], {})
        return [state[moment] for moment in MOMENTS if moment in state]

    def clear(self) -> None:
        """Drop all gradients."""
        self._adam.zero_grad(set_to_none=True)

    def steps_of(self, name: str) -> float | None:
        """Return the updates that a parameter has had; None when it is not trained or never had a gradient."""
        if held := self._holder(name):
            return held.steps_of(name)
        parameter = self.parameters.get(name)
        state = self._adam.state.get(parameter) if parameter is not None else None
        return float(state["step"]) if state else None

    def moments_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the moments of a parameter, which ranks without a part of it know too."""
        return MUON_MOMENTS if self._muon and self._muon.updates(name) else MOMENTS

    def state_of(self, name: str) -> dict[str, Tensor]:
        """Return the moments of one parameter, float32, for which `steps_of` is not None."""
        if held := self._holder(name):
            return held.read(name)
        state = self._adam.state[self.parameters[name]]
        if self._stream is None:
            return {key: state[key] for key in MOMENTS}
        found = {}
        for _ in self._stream.through([name], self._plain_memory):
            found = {key: state[key].clone() for key in MOMENTS}
        return found

    def moments(self) -> list[Tensor]:
        """Return the memory of all moments there are."""
        plain = [state[name] for state in self._adam.state.values() for name in MOMENTS]
        return plain + [each for held in self._held for each in held.memory()]

    def load_state(self, states: Iterable[tuple[str, float, Mapping[str, Tensor]]], steps_taken: int) -> None:
        """Take (name, `steps_of`, `state_of`) of each parameter that has moments, on its device, one by one."""
        self.steps_taken = steps_taken
        self._adam.state.clear()
        for held in self._held:
            held.clear()
        if self._stream:
            self._stream.forget()
        for name, steps, state in states:
            parameter = self.parameters.get(name)
            if holder := self._holder(name):
                holder.load(name, state, steps)
            elif parameter is not None:
                self._adam.state[parameter] = {"step": torch.tensor(steps, device=parameter.device), **state}
                if self._stream:
                    for _ in self._stream.through([name], self._plain_memory):
                        pass  # used once, it goes where it waits

    def _holder(self, name: str) -> HeldMoments | None:
        """Return what holds the moments of a parameter; None for torch's AdamW."""
        return next((held for held in self._held if name in held.parameters), None)


def clip_gradients(grads: Sequence[Tensor], grad_norm: float, limit: float) -> None:
    """Scale gradients in place, so that a norm above the limit becomes the limit.

    Args:
        grads: of this rank, which may have none.
        grad_norm: L2, of the gradients of all ranks.
        limit: of the norm; 0 for none.
    """
    if grads and limit and grad_norm > limit:
        torch._foreach_mul_(list(grads), limit / grad_norm)
