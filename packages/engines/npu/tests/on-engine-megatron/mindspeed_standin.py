"""A stand-in for MindSpeed: what makes megatron-core's calls that name CUDA mean the stand-in device.

The real adaptor imports `torch_npu.contrib.transfer_to_npu`, which does that for the whole process, and replaces
functions of megatron-core by fused ones; none of those is needed here. Each test's process is its own, so nothing is
undone.
"""

import sys
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

SETTINGS: list[dict[str, Any]] = []
"""The arguments that `repatch` got."""


class OnNpu(TorchFunctionMode):
    """Rewrites device arguments of torch's functions."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0].to(here())
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.npu.", "torch.cuda.")
        kwargs = {name: rewritten(name, value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.to:
            args = tuple(rewritten("device", value) for value in args)
        return func(*args, **kwargs)


def here():
    return torch.device("npu", torch.npu.current_device())


def rewritten(name, value):
    if name == "device" and isinstance(value, str | torch.device) and torch.device(value).type == "cuda":
        return here()
    return False if name == "pin_memory" else value


def repatch(settings):
    """Let this process's calls that name CUDA mean the device."""
    SETTINGS.append(settings)
    if len(SETTINGS) > 1:
        return
    random_state = import_module("megatron.core.tensor_parallel.random")
    random_state._get_cuda_rng_state = lambda *_, **__: torch.npu.get_rng_state()
    random_state._set_cuda_rng_state = lambda state, *_, **__: torch.npu.set_rng_state(state)
    runtime = {name: getattr(torch.npu, name) for name in ("synchronize", "empty_cache", "Stream", "Event")}
    runtime |= {
        "current_device": here,
        "manual_seed": lambda seed: torch.npu.manual_seed_all(seed),
        "get_rng_state": lambda device=None: torch.npu.get_rng_state(),
        "stream": lambda stream: nullcontext(stream),
        "current_stream": torch.npu.current_stream,
        "default_stream": torch.npu.current_stream,
    }
    for name, value in runtime.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = runtime["get_rng_state"]
    dist.all_to_all_single = with_list_splits(dist.all_to_all_single)
    OnNpu().__enter__()


def with_list_splits(all_to_all):
    """Split sizes may be tensors for HCCL, and are lists for gloo, which stands behind it here."""

    def exchange(output, input, *splits, **rest):
        return all_to_all(output, input, *[s.tolist() if isinstance(s, torch.Tensor) else s for s in splits], **rest)

    return exchange


def install():
    """Make `mindspeed.megatron_adaptor` importable in this process."""
    adaptor = ModuleType("mindspeed.megatron_adaptor")
    adaptor.repatch = repatch
    sys.modules |= {"mindspeed": ModuleType("mindspeed"), adaptor.__name__: adaptor}
