"""Decoder layers compiled by torch.compile: one graph for all layers of a class and for packs of any length.

Compiled, what lies between two matrix products is one or two kernels, which read an activation once; layer by layer,
because a whole model takes minutes to compile, and a layer seconds.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from offbeat_core import ConfigError, OffbeatError, TrainEngineConfig
from offbeat_device import Device, compiled, prepare_compiler
from offbeat_engine_torch._family_check import PAIR_TOKENS, TOLERANCE_NATS, FamilyCheck
from offbeat_engine_torch._layers.experts import ranks_of
from offbeat_engine_torch._layers.nf4 import packed_weights
from offbeat_engine_torch._layers.recurrence import has_recurrence
from offbeat_engine_torch._layout import TorchEngineOptions
from offbeat_engine_torch._model import CausalModel, one_line
from offbeat_engine_torch._parallel.ranks import Ranks
from offbeat_engine_torch._parallel.sharding import find_layers

log = logging.getLogger(__name__)


class CompiledLayers:
    """Layers of a decoder, which run compiled once `start` has found that they can.

    Args:
        layers: their first argument is the hidden states [1, T, E].
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.runs = False
        self._is_on_trial, self._problem = False, ""
        for layer in layers:
            layer.forward = self._either(layer.forward)

    def start(self, check: FamilyCheck, ranks: Ranks, *, required: bool) -> None:
        """Compile layers and passes over logits, with gradients and without, and compare; all stay as they are where
        that fails.

        Args:
            check: of the model, in the format in which it trains.
            ranks: all of them; they do the same.
            required: raise where it fails, instead of a warning.

        Raises:
            ConfigError: it fails, and is required.
        """
        began_s = time.monotonic()
        prepare_compiler()
        with torch.no_grad():
            wanted_N = check.packed_logprobs(PAIR_TOKENS)
        self.runs = self._is_on_trial = True
        problem = self._try(check, wanted_N, ranks)
        self._is_on_trial = False
        self.runs = not problem
        if problem and required:
            raise ConfigError(f"option compile_layers is on, and the decoder layers do not compile: {problem}")
        if problem and ranks.leader:
            log.warning("%s: the decoder layers run uncompiled, which is slower: %s", check.folder, problem)
        elif ranks.leader:
            log.info("%s: decoder layers compiled in %.0f s", check.folder, time.monotonic() - began_s)

    def _try(self, check: FamilyCheck, wanted_N: Tensor, ranks: Ranks) -> str:
        """Run forward and backward on a few tokens; what goes wrong on any rank, "" for nothing."""
        found: list[Tensor] = []

        def compare() -> str:
            with torch.no_grad():
                found_N = check.packed_logprobs(PAIR_TOKENS, fused=True)
            apart, bound = float((found_N - wanted_N).abs().max()), TOLERANCE_NATS[check.autocast]
            return "" if apart <= bound else f"other log-probabilities, {apart:.2g} nats apart ({bound} allowed)"

        def forward() -> None:
            found.append(check.packed_logprobs(PAIR_TOKENS, fused=True))

        def backward() -> None:
            found[0].sum().backward()  # type: ignore[no-untyped-call]

        try:
            # An exchange after each pass: in the next one the other ranks would wait for a rank that has stopped.
            for each in (compare, forward, backward):
                if problem := _first_problem(self._problem_of(each), ranks):
                    return problem
        finally:
            check.model.zero_grad(set_to_none=True)
        return ""

    def _problem_of(self, run_pass: Callable[[], str | None]) -> str:
        try:
            return run_pass() or self._problem
        except (OffbeatError, torch.OutOfMemoryError, torch.distributed.DistError):
            raise
        except RuntimeError as error:  # of the compiler of passes over logits, or of what was compiled
            return _describe(error)

    def _either(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        fast = compiled(forward)

        @wraps(forward)
        def either(*args: Any, **kwargs: Any) -> Any:
            # A dimension of one token would be a graph of its own; ranks without a sequence compute one.
            if not self.runs or self._problem or not args or args[0].shape[1] == 1:
                return forward(*args, **kwargs)
            hidden_1TE, *rest = args
            if torch.is_grad_enabled() and not hidden_1TE.requires_grad:  # of a frozen embedding, in the first layer
                hidden_1TE = hidden_1TE.detach().requires_grad_()
            try:
                return fast(hidden_1TE, *rest, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:  # of the tracer or the compiler: nothing has run
                if not self._is_on_trial:
                    raise
                # Ranks gather and add up in the rest of the pass: this one takes part, and reports the error after it.
                self._problem = _describe(error)
                return forward(hidden_1TE, *rest, **kwargs)

        return either


def _first_problem(problem: str, ranks: Ranks) -> str:
    """Return a problem of one of the ranks, the same on all; "" where none has one."""
    return next(filter(None, ranks.exchange(problem)), "")


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def choose_compiled(
    model: CausalModel,
    config: TrainEngineConfig,
    options: TorchEngineOptions,
    device: Device,
    kernel: str,
    ranks: Ranks,
) -> CompiledLayers | None:
    """Return the model's decoder layers ready to be compiled; None where they run as they are.

    Args:
        model: before its layers are called.
        config: of the engine.
        options: of the engine.
        device: of this rank.
        kernel: of packed attention.
        ranks: all of them; they do the same.

    Raises:
        ConfigError: option `compile_layers` is "on" and they cannot be compiled.
    """
    if options.compile_layers == "off" or options.is_exact:
        return None
    obstacles = {
        f"{type(model.whole).__name__} names no decoder layers": not find_layers(model),
        "experts on several ranks are sent as many tokens as choose them": any(
            ranks_of(module) for module in model.whole.modules()
        ),
        "weights in NF4 are unpacked for each pass, of which compiled code might keep one for the other": bool(
            packed_weights(model.whole)
        ),
        "the loss that balances experts reads what routers return": options.router_aux_loss > 0,
        "the gated delta rule reads as many blocks of rows as a pack has lengths": has_recurrence(model.whole),
        f"dtype = {config.dtype}: attention in bfloat16 alone is one call for packs of any length": (
            config.dtype != "bfloat16"
        ),
        f"device {device.torch_device} attends to packs by {kernel!r} and not by one call": kernel != "varlen",
    }
    obstacle = next((each for each, is_there in obstacles.items() if is_there), "")
    if not obstacle:  # these are the same on all ranks; the compiler is the host's
        obstacle = _first_problem(device.compiler_lacks(), ranks)
        if obstacle and options.compile_layers == "auto" and ranks.leader:
            log.warning("the decoder layers run uncompiled, which is slower: %s", obstacle)
    if obstacle and options.compile_layers == "on":
        raise ConfigError(f"option compile_layers is on, and decoder layers cannot be compiled: {obstacle}; use auto")
    if obstacle:
        return None
    decoder = set(model.decoder.modules())
    return CompiledLayers([layer for layer in find_layers(model) if layer in decoder])
