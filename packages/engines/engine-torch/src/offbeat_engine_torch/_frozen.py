"""The frozen base under LoRA adapters, held in bfloat16 or NF4: it gets no updates, which float32 weights are for.

It is held in the format in which its layers compute, so that a product reads a weight as it is; autocast would convert
a frozen float32 weight anew in every micro-batch. Float32 stay vectors, with which norms compute, embedding and head
where the head multiplies in float32, what the family keeps in it, and what no layer holds, such as the last norm.

In NF4 it is a quarter of that (`_layers/nf4.py`): linear layers and fused experts, but not routers, whose choices
are discrete.
"""

from collections.abc import Collection
from typing import Any, Final

import torch
from torch import nn

from offbeat_engine_torch._formats import is_router
from offbeat_engine_torch._layers.experts import has_fused_experts
from offbeat_engine_torch._layers.nf4 import BLOCK, hold_in_nf4
from offbeat_engine_torch._model import CausalModel, plain_name
from offbeat_engine_torch._parallel.sharding import find_layers, kept_in_float32


def base_in_bfloat16(model: CausalModel, *, rounds_vocabulary: bool) -> set[str]:
    """Return the names of the parameters that a base in bfloat16 holds in it: matrices that ranks would gather in it.

    Args:
        model: outlined or loaded, before it has adapters.
        rounds_vocabulary: embedding and head are among them, unless the family keeps one in float32.
    """
    kept = kept_in_float32(model)
    rounded = {module for layer in find_layers(model) for module in layer.modules()} - kept
    vocabulary = {model.whole.get_input_embeddings(), model.head}
    if rounds_vocabulary and not kept & vocabulary:
        rounded |= vocabulary
    return {
        plain_name(f"{path}.{name}")
        for path, module in model.whole.named_modules()
        if module in rounded
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 1
    }


_ROUTERS: Final = ("gate", "router", "shared_expert_gate")
"""Places of routers that are any linear layer, and of what weighs a shared expert."""


def pack_layers(model: CausalModel) -> None:
    """Hold linear layers and fused experts of an outlined model's decoder layers in NF4.

    Left as they are: routers, what the family keeps in float32, and rows that are no whole number of blocks.
    """
    kept, layers = kept_in_float32(model), find_layers(model)
    within = {module for layer in layers for module in layer.modules()} - kept
    for path, module in model.whole.named_modules():
        if module not in within or is_router(module) or path.rpartition(".")[2] in _ROUTERS:
            continue
        stacks = has_fused_experts(module)
        for name, parameter in list(module.named_parameters(recurse=False)):
            is_matrix = (isinstance(module, nn.Linear) and parameter.ndim == 2) or (stacks and parameter.ndim == 3)
            if is_matrix and parameter.shape[-1] % BLOCK == 0:
                hold_in_nf4(module, name)


def hold_in_bfloat16(model: CausalModel, names: Collection[str]) -> None:
    """Give the parameters of these names the format, and let the embedding hand on float32 as before."""
    for name, parameter in model.whole.named_parameters():
        if plain_name(name) in names:
            parameter.data = parameter.data.to(torch.bfloat16)
    embedding: Any = model.whole.get_input_embeddings()
    if embedding.weight.dtype == torch.bfloat16:
        embedding.register_forward_hook(lambda _, __, rows: rows.float())
