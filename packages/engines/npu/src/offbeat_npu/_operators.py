"""Fused operators of the platform in place of a model's layers, and what each computes, in plain torch.

`REFERENCE` is the documented meaning of each operator; the tests hold it to transformers' own layers on a CPU, and the
fused operators to it where there is an NPU. Source: torch_npu 2.13.0, torch_npu/_op_plugin_docs.py (meaning) and
op_plugin/meta/_meta_registrations.py (signatures).

Shapes: T tokens of a pack, B rows, S length, N heads, K key heads, D head size, * any leading dimensions.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from offbeat_core import ModelError
from offbeat_npu._masks import COMPRESSED, DENSE, RIGHT_DOWN_CAUSAL

ROTATION: Final = "apply_rotary_pos_emb"


@dataclass(frozen=True, kw_only=True)
class Operators:
    """The operators that are used, with the signatures of torch_npu.

    Args:
        npu_rms_norm: (x [*, D], gamma [D], epsilon) -> (y [*, D], 1 / rms).
        npu_swiglu: (x [*, 2 F], dim) -> [*, F]: silu of the first half times the second.
        npu_rotary_mul: (x [B, N, S, D], cos, sin [B or 1, 1, S, D]) -> [B, N, S, D].
        npu_fusion_attention: (query, key, value, head_num, input_layout, ...) -> (out, softmax statistics, ...).
    """

    npu_rms_norm: Callable[..., tuple[Tensor, ...]]
    npu_swiglu: Callable[..., Tensor]
    npu_rotary_mul: Callable[..., Tensor]
    npu_fusion_attention: Callable[..., tuple[Any, ...]]

    @classmethod
    def of(cls, library: Any) -> Self:
        """Return those of `library`, such as torch_npu."""
        return cls(**{name: getattr(library, name) for name in cls.__dataclass_fields__})


def substitute_operators(model: nn.Module, operators: Operators) -> tuple[str, ...]:
    """Let the norms, gated feed-forwards and rotations of a transformers model compute with `operators`.

    Norms and feed-forwards are changed in this model only. A rotation is a function of the model's module, so it
    changes for every model of that family in this process; one that does not compute what the operator does, such as
    that of Ernie 4.5, which interleaves, stays. Weights and their names stay as they are.

    Returns:
        What was replaced: "rms_norm", "swiglu", "rotary", in this order.
    """
    replaced = set()
    for module in model.modules():
        if _is_rms_norm(module):
            module.forward = _norm_forward(module, operators)
            replaced.add("rms_norm")
        elif _is_gated(module):
            module.forward = _gate_forward(module, operators)
            replaced.add("swiglu")
    for name in {type(module).__module__ for module in model.modules()}:
        rotation = getattr(sys.modules[name], ROTATION, None)
        if rotation is not None and (rotation.__module__ == __name__ or _rotates_halves(rotation)):
            setattr(sys.modules[name], ROTATION, _rotation(operators))
            replaced.add("rotary")
    return tuple(name for name in ("rms_norm", "swiglu", "rotary") if name in replaced)


def _is_rms_norm(module: nn.Module) -> bool:
    """Return an RMS norm that multiplies by its weight; Gemma's multiplies by 1 + weight and has another attribute."""
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def _is_gated(module: nn.Module) -> bool:
    """Return a feed-forward down(silu(gate) * up)."""
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    if not all(hasattr(module, part) for part in parts):
        return False
    activation = module.act_fn
    return activation is silu or type(activation).__name__ in ("SiLU", "SiLUActivation")


def _norm_forward(norm: Any, operators: Operators) -> Callable[[Tensor], Tensor]:
    epsilon = float(norm.variance_epsilon)

    def forward(x: Tensor) -> Tensor:
        return operators.npu_rms_norm(x, norm.weight.to(x.dtype), epsilon)[0]

    return forward


def _gate_forward(block: Any, operators: Operators) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        both = torch.cat((block.gate_proj(x), block.up_proj(x)), dim=-1)
        out: Tensor = block.down_proj(operators.npu_swiglu(both, dim=-1))
        return out

    return forward


def _rotation(operators: Operators) -> Callable[..., tuple[Tensor, Tensor]]:
    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        cos, sin = (x.unsqueeze(unsqueeze_dim).to(query.dtype) for x in (cos, sin))
        return operators.npu_rotary_mul(query, cos, sin), operators.npu_rotary_mul(key, cos, sin)

    return rotate


def _rotates_halves(rotation: Callable[..., Any]) -> bool:
    """Return whether a model's function does to whole heads what the operator does, with angles for all of each."""
    draw = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 4, 3, 8, generator=draw), torch.randn(1, 2, 3, 8, generator=draw)
    angles = torch.rand(1, 3, 4, generator=draw).repeat(1, 1, 2)
    try:
        found = rotation(query, key, angles.cos(), angles.sin())
        wanted = _rotation(REFERENCE)(query, key, angles.cos(), angles.sin())
        alike = all(one.allclose(other, atol=1e-5) for one, other in zip(found, wanted, strict=True))
    except Exception:  # noqa: BLE001  a function of that name may want or give anything
        return False
    try:
        rotation(query, key, angles.cos()[..., :4], angles.sin()[..., :4])
    except RuntimeError:
        return alike
    return False


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return gamma * (x.float() * scale).to(x.dtype), scale


def _swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.chunk(2, dim)
    return silu(gate) * up


def _rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    if rotary_mode != "half":
        raise ModelError(f"rotary_mode {rotary_mode!r} is not used here: half only")
    first, second = x.chunk(2, -1)
    return r1 * x + r2 * torch.cat((-second, first), -1)


def _fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    actual_seq_qlen: Sequence[int] = (),
    actual_seq_kvlen: Sequence[int] = (),
    sparse_mode: int = DENSE,
) -> tuple[Tensor]:
    """Layouts TND with the compressed causal mask, and BNSD with a mask of its own."""
    if input_layout == "TND" and sparse_mode == RIGHT_DOWN_CAUSAL:
        if atten_mask is None or atten_mask.shape != (COMPRESSED, COMPRESSED):
            got = "none" if atten_mask is None else list(atten_mask.shape)
            raise ModelError(f"sparse_mode {sparse_mode} needs the mask [{COMPRESSED}, {COMPRESSED}], got {got}")
        parts, query_start, key_start = [], 0, 0
        for query_end, key_end in zip(actual_seq_qlen, actual_seq_kvlen, strict=True):
            num_queries, num_keys = query_end - query_start, key_end - key_start
            hidden = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
            hidden = hidden.triu(1 + num_keys - num_queries)
            own = query[query_start:query_end].transpose(0, 1)
            keys, values = (x[key_start:key_end].transpose(0, 1) for x in (key, value))
            parts.append(_attend(own, keys, values, hidden, scale).transpose(0, 1))
            query_start, key_start = query_end, key_end
        return (torch.cat(parts),)
    if input_layout == "BNSD" and sparse_mode == DENSE:
        return (_attend(query, key, value, atten_mask, scale),)
    raise ModelError(f"layout {input_layout} with sparse_mode {sparse_mode} is not used here")


def _attend(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    """[..., N, S, D] with [..., K, S, D]; `hidden` is true where a query must not look."""
    groups = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = (query.float() @ key.float().transpose(-1, -2)) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden.bool(), float("-inf"))
    return (scores.softmax(-1) @ value.float()).to(value.dtype)


REFERENCE: Final = Operators(
    npu_rms_norm=_rms_norm,
    npu_swiglu=_swiglu,
    npu_rotary_mul=_rotary_mul,
    npu_fusion_attention=_fusion_attention,
)
