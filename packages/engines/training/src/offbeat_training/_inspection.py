"""Values that a model of transformers computes on the way, see `offbeat_core.Inspection`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from offbeat_core import EMBEDDING, FINAL_NORM, LAYER_POINTS, POSITIONS, TOKEN_IDS, ModelError, layer_point

_MIXERS = ("self_attn", "linear_attn")
_PROJECTIONS = {"q_proj": "query projection", "k_proj": "key projection", "v_proj": "value projection"}


@contextmanager
def record_points(model: Any, layer: int | None, *, is_compiled: bool = False) -> Iterator[dict[str, Tensor]]:
    """Record what the forward passes of a model compute while it is open; the last pass stays.

    Args:
        model: of transformers, for text.
        layer: whose `LAYER_POINTS` are recorded; None: what lies between layers.
        is_compiled: layers run compiled; they run as they are written meanwhile, so that their parts can be seen.

    Yields:
        Values by point, [T, width] float32 each, sorted into the order of computation when the block ends. Values that
        ranks share are left out.

    Raises:
        ModelError: the model has no such layer, or names no layers.
    """
    found: dict[str, Tensor] = {}
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(f"{type(model).__name__} names no decoder layers, so what they compute cannot be compared")
    if layer is not None and not 0 <= layer < len(layers):
        raise ModelError(f"layer {layer} was asked for, and {type(model).__name__} has layers 0 to {len(layers) - 1}")
    with ExitStack() as hooks:
        recorder = _Recorder(found, hooks)
        if layer is None:
            recorder.between_layers(decoder, layers)
        else:
            recorder.within(layers[layer])
        if is_compiled:  # not else: torch would look at each call of the process
            hooks.enter_context(torch.compiler.set_stance("force_eager"))
        yield found
    order = {name: place for place, name in enumerate(LAYER_POINTS)}
    for name in sorted(found, key=lambda name: order.get(name, -1)):
        found[name] = found.pop(name)


class _Recorder:
    """Hooks on modules, until `hooks` ends."""

    def __init__(self, found: dict[str, Tensor], hooks: ExitStack) -> None:
        self._found, self._hooks = found, hooks

    def between_layers(self, decoder: Any, layers: nn.ModuleList) -> None:
        self._before(decoder, self._note_inputs)
        self._after(decoder.embed_tokens, EMBEDDING)
        for number, layer in enumerate(layers):
            self._after(layer, layer_point(number))
        self._after(decoder.norm, FINAL_NORM)

    def within(self, layer: Any) -> None:
        mixer = next((found for name in _MIXERS if (found := getattr(layer, name, None)) is not None), None)
        mlp = getattr(layer, "mlp", None)
        if mixer is None or mlp is None:
            raise ModelError(f"{type(layer).__name__} has no attention or MLP under the usual names")
        self._before(mixer, self._takes("attention input"))
        for name, point in _PROJECTIONS.items():
            if (projection := getattr(mixer, name, None)) is not None:
                self._after(projection, point)
        last = getattr(mixer, "o_proj", None) or getattr(mixer, "out_proj", None)
        if last is not None:
            self._before(last, self._takes("attention"))
        self._watch_attention(mixer)
        norm = _norm_before_mlp(layer)
        self._before(mlp if norm is None else norm, self._takes("after attention"))
        self._before(mlp, self._takes("mlp input"))
        router = next((found for name in ("gate", "router") if (found := getattr(mlp, name, None)) is not None), None)
        if router is not None:
            self._hooks.callback(router.register_forward_hook(self._note_experts).remove)
        elif hasattr(mlp, "down_proj"):
            self._before(mlp.down_proj, self._takes("activation"))

    def _note(self, point: str, value: Any) -> None:
        value = value[0] if isinstance(value, tuple) else value
        if type(value) in (Tensor, nn.Parameter) and value.ndim >= 2:
            rows = value.detach().reshape(-1, value.shape[-1])
            self._found[point] = rows.to("cpu", torch.float32, copy=True)  # a model may write to it afterwards

    def _takes(self, point: str) -> Callable[..., None]:
        def note(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._note(point, positional[0] if positional else named.get("hidden_states"))

        return note

    def _note_inputs(self, _: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = positional[0] if positional else named.get("input_ids")
        if ids is not None:
            self._found[TOKEN_IDS] = ids.detach().reshape(-1, 1).float().cpu()
        if (positions := named.get("position_ids")) is not None:
            # [1, T], or [axes, 1, T] of a model whose positions have several.
            self._found[POSITIONS] = positions.detach().reshape(-1, positions.shape[-1]).T.float().cpu()

    def _note_experts(self, _: nn.Module, __: Any, output: Any) -> None:
        values = output if isinstance(output, tuple) else (output,)
        chosen = [each for each in values if isinstance(each, Tensor) and not each.is_floating_point()]
        if chosen:
            self._note("experts", chosen[0].sort(-1).values)

    def _before(self, module: Any, note: Callable[..., None]) -> None:
        self._hooks.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)

    def _after(self, module: Any, point: str) -> None:
        self._hooks.callback(module.register_forward_hook(lambda _, __, output: self._note(point, output)).remove)

    def _watch_attention(self, mixer: nn.Module) -> None:
        """Note queries and keys as attention gets them: no module gives them."""
        known = AttentionInterface._global_mapping
        name = getattr(getattr(mixer, "config", None), "_attn_implementation", None)
        if name not in known:
            return
        attend = known[name]

        def watched(module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **named: Any) -> Any:
            if module is mixer:
                self._note("query", query.squeeze(0).transpose(0, 1).flatten(1))
                self._note("key", key.squeeze(0).transpose(0, 1).flatten(1))
            return attend(module, query, key, *rest, **named)

        AttentionInterface.register(name, watched)
        self._hooks.callback(AttentionInterface.register, name, attend)


def _norm_before_mlp(layer: Any) -> Any:
    """Return the norm whose input is the residual stream after attention; None where the MLP takes that itself."""
    if (norm := getattr(layer, "pre_feedforward_layernorm", None)) is not None:
        return norm
    # Families that have no norm before attention have none before the MLP.
    return getattr(layer, "post_attention_layernorm", None) if hasattr(layer, "input_layernorm") else None
