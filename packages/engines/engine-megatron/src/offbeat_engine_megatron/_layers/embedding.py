"""Embeddings: the padding id, and what a vision tower sees.

Every rank of tp runs the whole tower (transformers' own module) on the images of its pack, and continues with
the tokens that it holds. The backward pass brings the gradient of all tokens back to each of them, so that none is a
part of the whole, and none is added up over tp. Ranks of dp and cp see other images or other tokens: their gradients
are added up with all others.

Shapes: L tokens of this rank, E hidden size, m placeholder tokens of this rank, K layers of DeepStack.
"""

from functools import cache
from typing import Any, Final

import torch
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor, nn

from offbeat_engine_megatron._packing import PassInputs
from offbeat_mesh import Group
from offbeat_training import ImageProcessor


def leave_out_padding(embedding: nn.Module, padding_id: int, tp: Group, *, cuts_tokens: bool) -> None:
    """Let no gradient flow into the row of `padding_id` from tokens that have it; a tied head still trains it.

    Of ids [1, L] the embedding answers [L, 1, E], or with `cuts_tokens` (sequence parallel) this rank's part of the L.
    Source: transformers' models make their table with `padding_idx` (torch.nn.Embedding).
    """

    def detach(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        ids_L: Tensor = kwargs["input_ids"][0]
        own_L = ids_L.chunk(tp.size)[tp.rank] if cuts_tokens else ids_L
        return torch.where((own_L == padding_id)[:, None, None], output.detach(), output)

    embedding.register_forward_hook(detach, with_kwargs=True)


def make_tower(hf_config: Any, config: Any, device: torch.device, *, trained: bool) -> Any:
    """Return a vision tower without weights yet, the whole of it on every rank; `config` is megatron-core's."""
    from transformers import AutoModel

    with torch.device(device):
        tower = AutoModel.from_config(hf_config.vision_config, dtype=config.params_dtype, attn_implementation="sdpa")
    if config.recompute_granularity is not None:
        tower.gradient_checkpointing_enable({"use_reentrant": False})
    tower.requires_grad_(requires_grad=trained)
    for parameter in tower.parameters():
        # Ranks of tp compute the same gradient, up to the order in which a device adds up: their mean keeps them alike.
        parameter.average_gradients_across_tp_domain = True
    return tower


def embed_images(
    tower: Any, asked: PassInputs, embeds_L1E: Tensor, *, tp: Group, cuts_tokens: bool
) -> tuple[Tensor, Tensor | None]:
    """Embeddings with what the tower sees in the places of images; and [L, K, E] for the first layers, if there are K.

    Patches without a place in the text are not used, but they are part of the graph: the backward pass goes through
    the tower, with gradients of zero.

    Args:
        tower: of transformers.
        asked: of the pack, with pixels.
        embeds_L1E: of this rank's tokens; with `cuts_tokens` those that it holds of L.
        tp: the ranks that share the pack.
        cuts_tokens: sequence parallel.
    """
    assert asked.pixels_PC is not None
    seen = tower(asked.pixels_PC.to(tower.dtype), grid_thw=asked.grid_I3)
    layers = torch.stack([seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())], 1)
    num_tokens = len(embeds_L1E) * (tp.size if cuts_tokens else 1)
    empty = layers.new_zeros(num_tokens, *layers.shape[1:])
    found = empty.index_copy(0, asked.place_m, layers.index_select(0, asked.seen_m)).to(embeds_L1E.dtype)
    marked = torch.zeros(num_tokens, dtype=torch.bool, device=found.device).index_fill(0, asked.place_m, value=True)
    if cuts_tokens:
        found = scatter_to_sequence_parallel_region(found, group=tp.process_group)
        marked = marked.chunk(tp.size)[tp.rank]
    embeds_L1E = torch.where(marked[:, None, None], found[:, :1], embeds_L1E)
    return embeds_L1E, found[:, 1:] if found.shape[1] > 1 else None


def add_deepstack(number: int, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """DeepStack. What is added is the layers' `context`: megatron-core hands it on, and recomputes with it.

    Source: `_deepstack_process` of transformers' Qwen3VLTextModel; megatron/core/transformer/transformer_layer.py.
    """
    deeper_LKE = kwargs.get("context")
    if deeper_LKE is None:
        return output
    hidden_L1E, context = output
    return hidden_L1E + deeper_LKE[:, number, None], context


_INSTALL: Final = 'pip install "offbeat-engine-megatron[vision]"'


def image_processor(hf_config: Any, model_path: str) -> ImageProcessor:
    """Image processor of a vision-language model of the Qwen-VL families."""

    @cache
    def outline() -> Any:
        """Return the model of transformers without memory: it computes positions from its configuration."""
        from transformers import AutoModel

        with torch.device("meta"):
            return AutoModel.from_config(hf_config)

    def rope_index(*args: Any, **kwargs: Any) -> Any:
        return outline().get_rope_index(*args, **kwargs)

    return ImageProcessor(hf_config, model_path, rope_index, _INSTALL)
