"""megatron-core's optimizer, with a schedule, clipping, and the right to refuse a step.

A parameter in bfloat16 is a rounded copy; what is updated, and goes into checkpoints, is its float32 main parameter.
The distributed optimizer holds it and Adam's moments cut over the ranks that share the parameter.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from offbeat_core import ConfigError, TrainEngineConfig, learning_rate_at
from offbeat_engine_megatron._layout import MegatronEngineOptions
from offbeat_training import clip_gradients


def wrap_parts(parts: Sequence[Any], config: Any, options: MegatronEngineOptions) -> list[Any]:
    """Return the model's parts in megatron-core's data parallel wrapper: gradients are added up, never averaged."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        use_distributed_optimizer=options.distributed_optimizer,
        check_for_nan_in_grad=False,
    )
    wrapped = [
        DistributedDataParallel(config=config, ddp_config=settings, module=part, disable_bucketing=number > 0)
        for number, part in enumerate(parts)
    ]
    if options.overlap_grad_reduce:
        no_sync = [part.no_sync for part in wrapped]
        config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    return wrapped


class ClippedOptimizer:
    """AdamW over the parts of the model on this rank.

    Gradients are reduced, measured, clipped and used in float32. Of weights in bfloat16 the optimizer holds float32
    copies, its main parameters: these are updated, and the weights are they, rounded.

    Attributes:
        parts: of the model, wrapped.
        megatron: the optimizer.
        each: the optimizers that it consists of: one for dense parameters, one for experts.
        steps_taken: updates done.
    """

    def __init__(self, parts: Sequence[Any], config: TrainEngineConfig, options: MegatronEngineOptions) -> None:
        self.parts, self.config = list(parts), config
        self.steps_taken = 0
        self._has_copies = config.dtype == "bfloat16"
        self._overlaps = options.overlap_grad_reduce
        self._reducing = self._learns = False
        self.megatron = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                adam_beta1=config.adam_beta1,
                adam_beta2=config.adam_beta2,
                adam_eps=config.adam_eps,
                bf16=self._has_copies,
                use_distributed_optimizer=options.distributed_optimizer,
                overlap_param_gather=options.overlap_param_gather,
                clip_grad=0.0,
            ),
            self.parts,
            use_gloo_process_groups=False,
        )
        self.each = getattr(self.megatron, "chained_optimizers", [self.megatron])

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return learning_rate_at(self.steps_taken, self.config)

    @property
    def in_update(self) -> bool:
        """Return whether there are gradients that no step has used."""
        return self._reducing

    def state(self) -> list[Tensor]:
        """Return this rank's part of Adam's moments, none before the first step, and of float32 weights."""
        states = [state for each in self.each for state in each.optimizer.state.values()]
        found = [value for state in states for name, value in sorted(state.items()) if name.startswith("exp_avg")]
        copies = [main.detach() for each in self.each for main in each.get_parameters()] if self._has_copies else []
        return found + copies

    def gradients(self) -> list[Tensor]:
        """Return the buffers into which gradients are added up."""
        return [buffer.grad_data for part in self.parts for buffer in (*part.buffers, *part.expert_parallel_buffers)]

    def begin_pass(self, *, learns: bool) -> None:
        """Prepare for a forward and backward pass; its gradients are added to those held.

        Args:
            learns: some rank has a token to learn from.

        Raises:
            ConfigError: the gradients of the update were reduced already.
        """
        if self._overlaps and self._reducing:
            raise ConfigError(
                "overlap_grad_reduce reduces the gradients while forward_backward computes, so an update is one "
                "forward_backward and one step: call step(), or set overlap_grad_reduce = false"
            )
        self._reducing = True
        self._learns |= learns

    def grad_norm(self) -> float:
        """Reduce the gradients over all ranks, and take the L2 norm of all; may be infinite or NaN. A call of all."""
        if self._overlaps and not self._reducing:
            for part in self.parts:
                part.start_grad_sync()
        self._reducing = False
        finalize_model_grads(self.parts, None)
        self.megatron.prepare_grads()
        return float(self.megatron.get_grad_norm())

    def step(self, grad_norm: float) -> None:
        """Clip from `grad_norm` to the configured norm, and update. A call of all.

        Where no pass had a token to learn from, the weights and the moments stay.
        """
        rate = self.learning_rate
        self.steps_taken += 1
        if not self._learns:
            return  # gradients of 0 would let momentum and weight decay move them
        grads = [p.grad for each in self.each for p in each.get_parameters() if p.grad is not None]
        clip_gradients(grads, grad_norm, self.config.max_grad_norm)
        for each in self.each:
            for group in each.param_groups:
                group["lr"] = rate * group["lr_mult"]
                group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
        self.megatron.step_with_ready_grads()

    def clear(self) -> None:
        """Drop all gradients."""
        if self._overlaps and self._reducing:  # a reduction under way has to end first
            for part in self.parts:
                part.finish_grad_sync()
        self._reducing = self._learns = False
        for part in self.parts:
            part.zero_grad_buffer()
        self.megatron.zero_grad()

    def gather_weights(self) -> None:
        """Make the weights on this rank those of the last step, where they would come with the next pass only."""
        for part in self.parts:
            if part.ddp_config.overlap_param_gather:
                part.start_param_sync(force_sync=True)


_MAIN: Final = "main"


class OptimizerState:
    """The state of each parameter, whole on each rank."""

    def __init__(self, optimizer: ClippedOptimizer) -> None:
        self._each = optimizer.each
        self._owners = {id(parameter): each for each in self._each for parameter in _parameters_of(each)}
        self._last: tuple[Any, dict[str, Tensor]] = (None, {})

    @torch.no_grad()
    def moment(self, name: str, parameter: Any) -> Tensor:
        """Return one of `MOMENTS`, in the parameter's shape, float32. All ranks that share its state call this."""
        if self._last[0] is not parameter:
            self._last = (parameter, {})
        known = self._last[1]  # queries, keys and values of one parameter are asked for one after the other
        if name not in known:  # and of experts in one parameter both moments, bucket after bucket
            known[name] = self._collect(parameter, name)
        return known[name]

    @torch.no_grad()
    def put_moment(self, name: str, parameter: Any, values: Tensor) -> None:
        """Set this rank's part of a moment from the whole of it."""
        found = self._find(parameter)
        if found is not None:
            inner, main, start, stop = found
            inner.state[main][name] = values.reshape(-1)[start:stop].clone().view_as(main)

    def weights(self, parameter: Any) -> Tensor:
        """Return what is trained, of the parameter's shape: itself, or the float32 values that it is rounded from.

        All ranks that share the parameter's state call this.
        """
        if self._is_copy(parameter):
            return self.moment(_MAIN, parameter)
        whole: Tensor = parameter.detach()
        return whole

    @torch.no_grad()
    def put_weights(self, parameter: Any, values: Tensor) -> None:
        """Set a parameter from float32 values, and this rank's part of the float32 copy behind it."""
        parameter.copy_(values)
        found = self._find(parameter) if self._is_copy(parameter) else None
        if found is not None:
            _, main, start, stop = found
            main.copy_(values.reshape(-1)[start:stop].view_as(main))

    def count_steps(self, steps_taken: int) -> None:
        """Set Adam's own count.

        torch's has a tensor for each parameter, which is counted up in place. The fused ones, which megatron-core takes
        where TransformerEngine or Apex is installed, have one for each group and nothing of the kind in their state.
        Source: TransformerEngine, transformer_engine/pytorch/optimizers/fused_adam.py (`step`, `state_dict`).
        """
        for each in self._each:
            if not isinstance(each.optimizer, torch.optim.Adam):  # AdamW is one
                _count_groups(each.optimizer, steps_taken)
                continue
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
        """Return the inner optimizer, its parameter, and which elements of ours that is.

        None where others hold all of it.
        """
        owner = self._owners[id(parameter)]
        if not hasattr(owner, "buffers"):
            main = parameter if parameter.dtype == torch.float32 else parameter.main_param
            return owner.optimizer, main, 0, parameter.numel()
        if parameter not in owner.model_param_group_index_map:
            return None
        group, order = owner.model_param_group_index_map[parameter]
        span = owner._get_model_param_range_map(parameter)["param"]
        return owner.optimizer, owner.optimizer.param_groups[group]["params"][order], span.start, span.end


def _count_groups(fused: Any, steps_taken: int) -> None:
    """Groups without parameters are not counted; one that a CUDA graph can hold counts on the device."""
    for group in fused.param_groups:
        if not group["params"]:
            continue
        on_device = getattr(fused, "capturable", False)
        device = group["params"][0].device
        group["step"] = torch.tensor([steps_taken], dtype=torch.int, device=device) if on_device else steps_taken


def _parameters_of(optimizer: Any) -> list[Any]:
    """Parameters of the model that one of megatron-core's optimizers updates: not the copies that it holds."""
    if hasattr(optimizer, "buffers"):  # the distributed optimizer
        return [parameter for buffer in optimizer.buffers for parameter in buffer.params]
    if hasattr(optimizer, "float16_groups"):
        groups = (*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups)
        return [parameter for group in groups for parameter in group]
    return list(optimizer.get_parameters())
