"""The lookup of token ids as transformers has it: the row of the padding id learns nothing from being looked up."""

from typing import Any

import torch
from torch import Tensor, nn

from offbeat_mesh import Group


def leave_out_padding(embedding: nn.Module, padding_id: int, tp: Group, *, cuts_tokens: bool) -> None:
    """Let no gradient flow into the row of `padding_id` from tokens that have it; a tied head still trains it.

    Source: transformers' models make their table with `padding_idx` (torch.nn.Embedding).

    Args:
        embedding: megatron-core's, called with input_ids [1, L]; it answers [L, 1, E], or with `cuts_tokens` this
            rank's part of the L.
        padding_id: in the vocabulary.
        tp: the ranks that share the table.
        cuts_tokens: sequence parallel.
    """

    def detach(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        ids_L: Tensor = kwargs["input_ids"][0]
        own_L = ids_L.chunk(tp.size)[tp.rank] if cuts_tokens else ids_L
        return torch.where((own_L == padding_id)[:, None, None], output.detach(), output)

    embedding.register_forward_hook(detach, with_kwargs=True)
