"""Values that megatron-core's layers compute on the way, by the points of `offbeat_core.Inspection`.

megatron-core's projection of queries, keys and values gives the heads of one group after another: its queries, its key,
its value. What ranks of tp share, tokens or heads, is put together as it is computed.

Source: megatron-core 0.16.1, megatron/core/transformer/: transformer_layer.py, attention.py
(get_query_key_value_tensors), mlp.py, moe/router.py.

Shapes: L tokens of a rank, T of the sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from offbeat_core import EMBEDDING, FINAL_NORM, LAYER_POINTS, TOKEN_IDS, Floats, Inspection, layer_point
from offbeat_mesh import Mesh

_Cut = Literal["", "tokens", "columns"]
"""Dim of a value that the ranks of tp share: its tokens under sequence parallel alone, its columns always."""
_PROJECTIONS: Final = ("query projection", "key projection", "value projection")


@contextmanager
def record_points(
    parts: Sequence[Any], layer: int | None, mesh: Mesh, *, cuts_tokens: bool
) -> Iterator[dict[str, Floats]]:
    """Record what the forward passes of this rank's parts compute while it is open; all ranks of tp open it alike.

    Args:
        parts: of the model.
        layer: whose `LAYER_POINTS` are recorded, where this rank has it; None: what lies between layers.
        mesh: of the ranks.
        cuts_tokens: they compute sequence parallel.

    Yields:
        [L, width] float32 by point.
    """
    found: dict[str, Floats] = {}
    with ExitStack() as hooks:
        recorder = _Recorder(found, hooks, mesh, cuts_tokens=cuts_tokens)
        for part in parts:
            if layer is None:
                recorder.between_layers(part)
            for each in part.decoder.layers:
                if each.layer_number - 1 == layer:  # megatron-core counts from 1
                    recorder.within(each)
        yield found


def whole_sequence(found: dict[str, Floats], num_tokens: int, num_layers: int, mesh: Mesh) -> Inspection:
    """Return the values of the first `num_tokens` tokens of all stages, in the order of computation; all ranks call it.

    Padding behind a sequence is left out, and a rank whose share has no sequence has no values.
    """
    stages = mesh.group("pp")
    if stages.size > 1:
        for part in stages.all_gather_data(dict(found)):
            found.update(part)
    between = [TOKEN_IDS, EMBEDDING, *map(layer_point, range(num_layers)), FINAL_NORM]
    order = [point for point in (*between, *LAYER_POINTS) if point in found]
    return {point: found[point][:num_tokens] for point in order}


class _Recorder:
    """Hooks on modules, until `hooks` ends."""

    def __init__(self, found: dict[str, Floats], hooks: ExitStack, mesh: Mesh, *, cuts_tokens: bool) -> None:
        self._found, self._hooks, self._tp, self._cuts_tokens = found, hooks, mesh.group("tp"), cuts_tokens

    def between_layers(self, part: Any) -> None:
        if part.pre_process:
            self._before(part, lambda asked: self._note(TOKEN_IDS, "", asked.ids_1L.T))
            self._gives(part.embedding, EMBEDDING, "tokens")
        for layer in part.decoder.layers:
            self._gives(layer, layer_point(layer.layer_number - 1), "tokens")
        if part.decoder.final_layernorm is not None:
            self._gives(part.decoder.final_layernorm, FINAL_NORM, "tokens")

    def within(self, layer: Any) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        self._gives(layer.input_layernorm, "attention input", "tokens")
        self._after(attention.linear_qkv, partial(self._note_projections, attention))
        self._before(attention.core_attention, self._note_heads)
        self._takes(attention.linear_proj, "attention", "columns")
        self._takes(layer.pre_mlp_layernorm, "after attention", "tokens")
        self._gives(layer.pre_mlp_layernorm, "mlp input", "tokens")
        if (router := getattr(mlp, "router", None)) is not None:
            self._after(router, self._note_experts)
        else:
            self._takes(mlp.linear_fc2, "activation", "columns")

    def _note(self, point: str, cut: _Cut, values: Tensor) -> None:
        rows = values.detach().flatten(1).float()
        if self._tp.size > 1 and (cut == "columns" or (cut == "tokens" and self._cuts_tokens)):
            pieces = self._tp.all_gather(rows.contiguous())
            rows = torch.cat(list(pieces), 1 if cut == "columns" else 0)
        self._found[point] = rows.to("cpu", copy=True).numpy()  # a model may write to it afterwards

    def _note_projections(self, attention: Any, output: Any) -> None:
        """[L, 1, groups (queries + 2) D]: queries, key and value of one group after another."""
        width, num_groups = attention.hidden_size_per_attention_head, attention.num_query_groups_per_partition
        by_group = torch.unflatten(_first(output), -1, (num_groups, -1))
        queries = by_group.shape[-1] - 2 * width
        for point, part in zip(_PROJECTIONS, by_group.split_with_sizes([queries, width, width], -1), strict=True):
            self._note(point, "columns", part)

    def _note_heads(self, query_LHD: Tensor, key_LKD: Tensor, *_: Any, **__: Any) -> None:
        self._note("query", "columns", query_LHD)
        self._note("key", "columns", key_LKD)

    def _note_experts(self, output: Any) -> None:
        """Note which columns of the router's map [L, experts] are set: as many in each row."""
        chosen_LX = output[1].flatten(0, -2)
        self._note("experts", "tokens", chosen_LX.nonzero()[:, 1].reshape(len(chosen_LX), -1))

    def _gives(self, module: nn.Module, point: str, cut: _Cut) -> None:
        self._after(module, lambda output: self._note(point, cut, _first(output)))

    def _takes(self, module: nn.Module, point: str, cut: _Cut) -> None:
        self._before(module, lambda given, *_, **__: self._note(point, cut, given))

    def _after(self, module: nn.Module, note: Callable[[Any], None]) -> None:
        self._hooks.callback(module.register_forward_hook(lambda _, __, output: note(output)).remove)

    def _before(self, module: nn.Module, note: Callable[..., None]) -> None:
        def hook(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            note(*positional, **named)

        self._hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found
