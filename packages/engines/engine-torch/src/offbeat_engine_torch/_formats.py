"""Number formats within a model of bfloat16: what stays in float32, and in what format experts and routers compute.

Under autocast a linear layer computes in bfloat16, whatever the format of its weights. Two kinds of layers in mixtures
of experts need more than that: the products of experts, which autocast does not know, and routers; many of these
compute in float32 on purpose.

Shapes: T tokens, E hidden size, K experts of a token.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

ROUTER_BIASES: Final = ("e_score_correction_bias", "expert_bias")
"""Names of what routers add to their scores before they choose.

Scores are between 0 and 1, where numbers in bfloat16 are 0.004 apart; pre-training moves these biases by 0.001 at a
time (DeepSeek-V3, arXiv:2412.19437, section 4.2).
"""


def stays_in_float32(whole: Any) -> Callable[[str], bool]:
    """Return the rule by which a tensor of a transformers model, given its name, stays in float32 when others do not.

    Those do that transformers itself keeps in float32 in a model of bfloat16 (`_keep_in_fp32_modules_strict`), and
    routers' correction biases: not all families mark theirs (MiniMax-M2, AFMoE, Laguna), but sampling engines hold
    them in float32.
    Source: transformers 5.19.0, `_get_dtype_plan` in modeling_utils.py, `build_glob_alternation` in
    core_model_loading.py; vllm 0.32.0, vllm/model_executor/models (`e_score_correction_bias`, `expert_bias`).
    """
    marks = getattr(whole, "_keep_in_fp32_modules_strict", None) or ()
    patterns = [re.compile(mark.replace("*", ".*")) for mark in marks]

    def stays(name: str) -> bool:
        return name.rpartition(".")[2] in ROUTER_BIASES or any(pattern.search(name) for pattern in patterns)

    return stays


def hold_biases_as_buffers(whole: nn.Module) -> None:
    """Make buffers of correction biases that their family has as parameters without a gradient.

    Most families have buffers. Parameters would be cut over the ranks, and gathered in the format of the layer.
    """
    for module in whole.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name in ROUTER_BIASES and not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, parameter.detach())


_ROUTER: Final = re.compile(r"(Router|(?<!Forget)Gate|Gating)$")
"""Endings of the names of transformers' router classes; a ForgetGate is of linear attention."""


def is_router(module: nn.Module) -> bool:
    """Return whether a module of a transformers model chooses experts."""
    return bool(_ROUTER.search(type(module).__name__))


def wrap_router(router: nn.Module, wrapper: Callable[..., Any]) -> None:
    """Let `wrapper` compute what a router returns.

    By a class that all routers of a class share, and not by a forward of each router's own, which `torch.compile` takes
    for a constant: it would compile each layer anew.

    Args:
        router: of a transformers model; those that it was wrapped in before stay.
        wrapper: called with the router, its forward until now, and the arguments of the call.
    """
    family: Any = type(router)
    place = f"wrapper_{len(family.__mro__)}"  # a class of its own has one more: no other wrapper is there
    setattr(router, place, wrapper)
    router.__class__ = _wrapped(family, place)


@cache
def _wrapped(family: Any, place: str) -> Any:
    """Return a class of routers, of its family's name, whose wrapper is the attribute `place`."""

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        return getattr(self, place)(self, partial(family.forward, self), *args, **named)

    return type(family.__name__, (family,), {"forward": forward, "__module__": family.__module__})


def route_as_the_family(whole: Any) -> None:
    """Let routers compute in float32 under autocast where those of a transformers model of bfloat16 do.

    Expected: a router that turns activations and weights to float32 before it multiplies has logits in float32.
    Happens: autocast turns both back, and experts are chosen, and weighed, by scores of 8 bits; engines that sample
    choose by float32. The weights are those of bfloat16, as they travel to these engines. Other routers compute in
    bfloat16 there and here.
    """
    stays, in_float32 = stays_in_float32(whole), dict[type, bool]()
    for path, module in whole.named_modules():
        if is_router(module):
            kept = {name for name, _ in module.named_parameters() if stays(f"{path}.{name}")}
            wrap_router(module, _Routing(kept, in_float32))


class _Routing:
    """The format in which a router computes.

    Args:
        kept: names of its parameters that stay in float32.
        in_float32: by class, shared with other routers: those that compute in float32 outside of autocast.
    """

    def __init__(self, kept: Collection[str], in_float32: dict[type, bool]) -> None:
        self._kept, self._in_float32 = kept, in_float32

    def __call__(self, router: nn.Module, own: Callable[..., Any], *args: Any, **named: Any) -> Any:
        kind = next(router.parameters()).device.type
        if torch.is_autocast_enabled(kind) and self._multiplies_in_float32(router, kind, own, args, named):
            with self._as_the_family(router, kind):
                return own(*args, **named)
        return own(*args, **named)

    @contextmanager
    def _as_the_family(self, router: nn.Module, kind: str) -> Iterator[torch.dtype]:
        """Run without autocast, with weights in the family's format."""
        dtype = torch.get_autocast_dtype(kind)
        with _weights_in(dtype, router, self._kept), torch.autocast(kind, enabled=False):
            yield dtype

    @torch.no_grad()
    def _multiplies_in_float32(
        self, router: nn.Module, kind: str, own: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> bool:
        """Return whether it does so even for activations and weights of another format; found out at the first call."""
        router_class = type(router)
        if router_class not in self._in_float32:
            with self._as_the_family(router, kind) as dtype, _Products() as products:
                rounded = {name: _rounded(value, dtype) for name, value in named.items()}
                own(*(_rounded(value, dtype) for value in args), **rounded)
            self._in_float32[router_class] = products.formats == {torch.float32}
        return self._in_float32[router_class]


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


class _Products(TorchFunctionMode):
    """Notes the formats of factors."""

    def __init__(self) -> None:
        super().__init__()
        self.formats = set[torch.dtype]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (functional.linear, torch.matmul, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.mm):
            self.formats.update(each.dtype for each in args[:2])
        return func(*args, **(kwargs or {}))


@contextmanager
def _weights_in(dtype: torch.dtype, layer: nn.Module, kept: Collection[str]) -> Iterator[None]:
    """Let a layer see its parameters, but those kept, in another format; gradients arrive at the parameters."""
    held = [
        (owner._parameters, name, parameter)
        for path, owner in layer.named_modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if f"{path}.{name}".removeprefix(".") not in kept
    ]
    try:
        for place, name, parameter in held:
            place[name] = parameter.to(dtype)
        yield
    finally:
        for place, name, parameter in held:
            place[name] = parameter
