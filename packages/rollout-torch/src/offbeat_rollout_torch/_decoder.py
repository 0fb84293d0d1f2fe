"""The forward pass: plain functions over `DecoderWeights`, with as few operators per layer as the result allows."""

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from offbeat_rollout_torch._attention import Attention
from offbeat_rollout_torch._families import Architecture
from offbeat_rollout_torch._weights import DecoderWeights, LayerWeights


def decode_hidden(weights: DecoderWeights, ids_N: Tensor, rotations_PC: Tensor, attention: Attention) -> Tensor:
    """Run the layers.

    Args:
        weights: frozen.
        ids_N: [N] int64 tokens of the pass, packed.
        rotations_PC: [positions, head_dim / 2] complex64.
        attention: planned for these tokens.

    Returns:
        [N, hidden] before the last norm.
    """
    a = weights.architecture
    x = F.embedding(ids_N, weights.embedding)
    turns = rotations_PC.index_select(0, attention.positions_N)[:, None]
    for index, layer in enumerate(weights.layers):
        qkv = layer.qkv(F.rms_norm(x, (a.hidden_size,), layer.input_norm, a.norm_eps))
        qkv = qkv.view(len(x), -1, a.head_dim)
        _turn(qkv[:, : a.num_heads + a.num_kv_heads], turns, layer, a)
        x = layer.out.plus(attention(index, qkv), x)
        h = F.rms_norm(x, (a.hidden_size,), layer.mlp_norm, a.norm_eps)
        x = layer.down.plus(layer.up.times(h, layer.gate.silu(h)), x)
    return x


def decode_logits(weights: DecoderWeights, hidden_BH: Tensor) -> Tensor:
    """[B, hidden] of the tokens to go on from, to [B, vocabulary] float32."""
    a = weights.architecture
    assert weights.head is not None
    return weights.head(F.rms_norm(hidden_BH, (a.hidden_size,), weights.final_norm, a.norm_eps)).float()


def _turn(qk_NhD: Tensor, turns_N1C: Tensor, layer: LayerWeights, a: Architecture) -> None:
    """Normalise heads where the family does, and rotate by position; in place."""
    if a.qk_norm:
        torch.mul(F.rms_norm(qk_NhD, (a.head_dim,), None, a.norm_eps), layer.qk_norm, out=qk_NhD)
    pairs = torch.unflatten(qk_NhD, -1, (-1, 2))
    if pairs.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(turns_N1C)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * turns_N1C))
