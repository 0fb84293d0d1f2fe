"""What the vision tower sees, put where the images stand: among the embeddings, and behind the first layers.

Every rank of tp runs the whole tower on the images of its pack, and goes on with the tokens that it holds. The backward
pass brings the gradient of all tokens back to each of them, so that none is a part of the whole, and none is added up
over tp. Ranks of dp and cp see other images or other tokens: their gradients are added up with all others.

Shapes: L tokens of this context parallel rank, E hidden size, K layers of DeepStack, m placeholder tokens of this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor, nn

from offbeat_engine_megatron._rotary import rotary_axes
from offbeat_engine_megatron._tower import make_tower
from offbeat_mesh import Group


@dataclass(frozen=True, kw_only=True)
class View:
    """What the tower is given for one pack, on this rank's device.

    Args:
        pixels_PC: patches of all images, as the model's image processor cuts them.
        grid_I3: patches of each image in time, height and width.
        seen_m: which of what the tower sees lies on this rank; empty where the patches stand for no image.
        place_m: index among this rank's tokens of each.
    """

    pixels_PC: Tensor
    grid_I3: Tensor
    seen_m: Tensor
    place_m: Tensor


def add_tower(
    parts: Sequence[Any], hf_config: Any, device: torch.device, tp: Group, *, deepstack: int, trained: bool
) -> None:
    """Put the tower into the first part of the model, and the axes of positions into all.

    Args:
        parts: of the model on this rank.
        hf_config: of the model.
        device: of this rank.
        tp: the ranks that share the layers.
        deepstack: layers behind which something of the tower is added.
        trained: whether the tower learns.
    """
    axes_F = rotary_axes(hf_config, device)
    for part in parts:
        part.axes_F = axes_F
        if not part.pre_process:
            continue
        config = part.config
        recompute = config.recompute_granularity is not None
        part.visual = make_tower(hf_config, config.params_dtype, device, trained=trained, recompute=recompute)
        part.look = partial(look, part.visual, tp=tp, cuts_tokens=config.sequence_parallel)
        for number, layer in enumerate(part.decoder.layers[:deepstack]):
            layer.register_forward_hook(partial(_add_deeper, number), with_kwargs=True)


def look(tower: Any, view: View, embeds_L1E: Tensor, *, tp: Group, cuts_tokens: bool) -> tuple[Tensor, Tensor | None]:
    """Embeddings with what the tower sees in the places of images; and [L, K, E] for the first layers, if there are K.

    Of patches that stand nowhere nothing is taken, but they are part of the graph: the backward pass goes through the
    tower, with gradients of zero.

    Args:
        tower: of transformers.
        view: of the pack.
        embeds_L1E: of this rank's tokens; with `cuts_tokens` those that it holds of L.
        tp: the ranks that share the pack.
        cuts_tokens: sequence parallel.
    """
    seen = tower(view.pixels_PC.to(tower.dtype), grid_thw=view.grid_I3)
    layers = torch.stack([seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())], 1)
    num_tokens = len(embeds_L1E) * (tp.size if cuts_tokens else 1)
    empty = layers.new_zeros(num_tokens, *layers.shape[1:])
    found = empty.index_copy(0, view.place_m, layers.index_select(0, view.seen_m)).to(embeds_L1E.dtype)
    marked = torch.zeros(num_tokens, dtype=torch.bool, device=found.device).index_fill(0, view.place_m, value=True)
    if cuts_tokens:
        found = scatter_to_sequence_parallel_region(found, group=tp.process_group)
        marked = marked.chunk(tp.size)[tp.rank]
    embeds_L1E = torch.where(marked[:, None, None], found[:, :1], embeds_L1E)
    return embeds_L1E, found[:, 1:] if found.shape[1] > 1 else None


def _add_deeper(number: int, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """DeepStack. What is added is the layers' `context`: megatron-core hands it on, and recomputes with it.

    Source: `_deepstack_process` of transformers' Qwen3VLTextModel; megatron/core/transformer/transformer_layer.py.
    """
    deeper_LKE = kwargs.get("context")
    if deeper_LKE is None:
        return output
    hidden_L1E, context = output
    return hidden_L1E + deeper_LKE[:, number, None], context
