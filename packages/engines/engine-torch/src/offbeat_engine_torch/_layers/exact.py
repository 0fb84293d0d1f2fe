"""Exact numerics of the trainer: the forward pass of transformers' layers is `offbeat_device.exact_layer`.

The sampler computes the same functions, so log-probabilities are equal to the bit under equal weights. Weights are
rounded to the format in which they are sampled with, and adapters are merged before that, as they are on their way.

Shapes: T packed tokens, E hidden size, H query heads, J key heads, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from offbeat_core import ModelError
from offbeat_device import (
    ExactLayer,
    check_exact,
    check_exact_family,
    exact_layer,
    exact_norm,
    exact_with_gradient_of,
    trained_product,
)
from offbeat_engine_torch._layers.attention import attend, attend_exactly
from offbeat_training import LoraLinear


def check_exact_model(hf_config: Any) -> None:
    """Refuse a model whose layers have other arithmetic.

    Raises:
        ConfigError: its family has.
        ModelError: this model of the family has.
    """
    check_exact_family(hf_config.model_type)
    layer_types = getattr(hf_config, "layer_types", None) or ()
    if hf_config.hidden_act != "silu" or "sliding_attention" in layer_types:
        raise ModelError(
            f'numerics = "exact" needs hidden_act silu and no sliding windows, got {hf_config.hidden_act} and layers '
            f'{sorted(set(layer_types))}: set numerics = "native"'
        )


def make_exact(whole: Any, layers: Sequence[Any], norm: Any, dtype: torch.dtype) -> None:
    """Let a loaded model compute exactly, with products in `dtype`.

    Args:
        whole: transformers model; before its layers are recomputed or compiled.
        layers: its decoder layers. Without the plan of a pack they compute as transformers writes them.
        norm: the last one.
        dtype: of the sampler's weights.

    Raises:
        ConfigError: the device has no products for it.
    """
    config = whole.config
    width, head_dim = config.hidden_size, layers[0].self_attn.head_dim
    heads = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    shapes = [
        (heads[0] + 2 * heads[1], width),
        (width, heads[0]),
        (config.intermediate_size, width),
        (width, config.intermediate_size),
    ]
    device = next(whole.parameters()).device
    check_exact(device, dtype, shapes, head_dim, head=(config.vocab_size, width))
    for layer in layers:
        family: Any = type(layer)
        layer.__class__ = _exact_layer_class(family, dtype)
    family = type(norm)
    norm.__class__ = _exact_norm_class(family, dtype)
    whole.get_input_embeddings().register_forward_hook(lambda _, __, rows: rows.to(dtype).float())


@cache
def _exact_norm_class(family: Any, dtype: torch.dtype) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return exact_norm(x, self.weight.to(dtype), self.variance_epsilon)

    return type(f"Exact{family.__name__}", (family,), {"forward": forward})


@cache
def _exact_layer_class(family: Any, dtype: torch.dtype) -> Any:
    """Return a family's class of decoder layers with another forward: FSDP and checkpoints find the same modules."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, plan: Any = None, **rest: Any) -> Any:
        if plan is None:
            return family.forward(self, hidden_states, *args, **rest)
        cos, sin = (each[0].chunk(2, -1)[0].float() for each in rest["position_embeddings"])
        own = self.self_attn
        how = {"kernel": rest["kernel"], "keys": rest["keys"], "scale": own.head_dim**-0.5}
        attention = partial(_attend, plan, own.config.num_attention_heads, own.config.num_key_value_heads, how)
        return exact_layer(hidden_states[0], _layer(self, dtype), torch.stack((cos, sin), -1), attention)[None]

    return type(f"Exact{family.__name__}", (family,), {"forward": forward})


def _attend(plan: Any, num_heads: int, num_keys: int, how: dict[str, Any], qkv_TND: Tensor) -> Tensor:
    """Attend within the sequences of a pack, [T, H + 2 J, D] to [T, H * D]."""
    parts = torch.split(qkv_TND, [num_heads, num_keys, num_keys], 1)

    def native(*parts_ThD: Tensor) -> Tensor:
        query, key, value = (each.transpose(0, 1)[None] for each in parts_ThD)
        return attend(query, key, value, None, plan, how["kernel"], how["keys"], how["scale"], None)[0]

    exact = partial(attend_exactly, plan=plan, scale=how["scale"])
    return exact_with_gradient_of(exact, native, *parts).flatten(1)


def _layer(layer: Any, dtype: torch.dtype) -> ExactLayer:
    own, mlp = layer.self_attn, layer.mlp
    query_norm, key_norm = (getattr(own, name, None) for name in ("q_norm", "k_norm"))
    return ExactLayer(
        input_norm=layer.input_layernorm.weight.to(dtype),
        qkv=_product(dtype, own.q_proj, own.k_proj, own.v_proj),
        query_norm=None if query_norm is None else query_norm.weight.to(dtype),
        key_norm=None if key_norm is None else key_norm.weight.to(dtype),
        out=_product(dtype, own.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.to(dtype),
        gate=_product(dtype, mlp.gate_proj),
        up=_product(dtype, mlp.up_proj),
        down=_product(dtype, mlp.down_proj),
        num_heads=own.config.num_attention_heads,
        num_kv_heads=own.config.num_key_value_heads,
        eps=layer.input_layernorm.variance_epsilon,
        dtype=dtype,
    )


def _product(dtype: torch.dtype, *layers: Any) -> Callable[[Tensor], Tensor]:
    """Return the product with linear layers, one below the other, as the sampler holds them.

    An adapter is merged by the very operation that exports it.
    """

    def make(*tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        left, weights, biases = iter(tensors), list[Tensor](), list[Tensor]()
        for layer in layers:
            weight = next(left)
            if _base(layer).bias is not None:
                biases.append(next(left).to(dtype))
            if _is_adapted(layer):
                weight = torch.addmm(weight.float(), next(left), next(left), alpha=layer.scale)
            weights.append(weight.to(dtype))
        return _joined(weights), _joined(biases) if biases else None

    return lambda x: trained_product(x, make, *(tensor for layer in layers for tensor in _tensors(layer)))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _tensors(layer: Any) -> Iterator[Tensor]:
    """Yield a layer's weight, its bias if any, and both sides of its adapter if any."""
    base = _base(layer)
    yield base.weight
    if base.bias is not None:
        yield base.bias
    if _is_adapted(layer):
        yield from (layer.lora_B.weight, layer.lora_A.weight)


def _base(layer: Any) -> nn.Linear:
    base: nn.Linear = layer.lora_base if isinstance(layer, LoraLinear) else layer
    return base


def _is_adapted(layer: Any) -> bool:
    return isinstance(layer, LoraLinear) and layer.active
