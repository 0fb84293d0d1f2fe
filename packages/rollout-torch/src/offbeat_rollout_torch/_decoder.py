"""The forward pass: plain functions over `DecoderWeights`, with as few operators per layer as the result allows."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from offbeat_rollout_torch._attention import Attention
from offbeat_rollout_torch._families import Architecture
from offbeat_rollout_torch._weights import DecoderWeights, LayerWeights


@dataclass(frozen=True)
class Sight:
    """What the vision tower has to say to the tokens of one pass.

    Args:
        place_M: [M] int64, which tokens of the pass stand for images.
        embeds_MH: what is in the place of their embeddings.
        deeper: [M, hidden] each, added to what the first layers give (Qwen3-VL; none in Qwen2.5-VL).
    """

    place_M: Tensor
    embeds_MH: Tensor
    deeper: tuple[Tensor, ...] = ()


def decode_hidden(
    weights: DecoderWeights,
    ids_N: Tensor,
    rotations_PC2: Tensor,
    attention: Attention,
    *,
    turns_NC2: Tensor | None = None,
    sight: Sight | None = None,
) -> Tensor:
    """Run the layers.

    Args:
        weights: frozen.
        ids_N: [N] int64 tokens of the pass, packed.
        rotations_PC2: [positions, head_dim / 2, 2] float32, cosine and sine.
        attention: planned for these tokens.
        turns_NC2: the rotation of each token, where its place in the cache does not say it.
        sight: of the images among these tokens.

    Returns:
        [N, hidden] before the last norm.
    """
    a = weights.architecture
    x = F.embedding(ids_N, weights.embedding)
    if sight is not None:
        x.index_copy_(0, sight.place_M, sight.embeds_MH.to(x.dtype))
    turns = (rotations_PC2.index_select(0, attention.positions_N) if turns_NC2 is None else turns_NC2)[:, None]
    for index, layer in enumerate(weights.layers):
        qkv = layer.qkv(F.rms_norm(x, (a.hidden_size,), layer.input_norm, a.norm_eps))
        qkv = qkv.view(len(x), -1, a.head_dim)
        _turn(qkv[:, : a.num_heads + a.num_kv_heads], turns, layer, a)
        x = layer.out.plus(attention(index, qkv), x)
        h = F.rms_norm(x, (a.hidden_size,), layer.mlp_norm, a.norm_eps)
        x = layer.down.plus(layer.up.times(h, layer.gate.silu(h)), x)
        if sight is not None and index < len(sight.deeper):
            x.index_add_(0, sight.place_M, sight.deeper[index].to(x.dtype))
    return x


def decode_logits(weights: DecoderWeights, hidden_BH: Tensor) -> Tensor:
    """[B, hidden] of the tokens to go on from, to [B, vocabulary] float32."""
    a = weights.architecture
    assert weights.head is not None
    return weights.head(F.rms_norm(hidden_BH, (a.hidden_size,), weights.final_norm, a.norm_eps)).float()


def _turn(qk_NhD: Tensor, turns_N1C2: Tensor, layer: LayerWeights, a: Architecture) -> None:
    """Normalise heads where the family does, and rotate by position; in place.

    A CPU has one operator for it, on complex numbers; other devices lack that, or views that it could write through.
    """
    if a.qk_norm:
        torch.mul(F.rms_norm(qk_NhD, (a.head_dim,), None, a.norm_eps), layer.qk_norm, out=qk_NhD)
    pairs = torch.unflatten(qk_NhD, -1, (-1, 2))
    turned = pairs.float()  # the same tensor where it is float32
    if turned.is_cpu:
        torch.view_as_complex(turned).mul_(torch.view_as_complex(turns_N1C2))
    else:
        (x, y), (cos, sin) = turned.unbind(-1), turns_N1C2.unbind(-1)
        turned = torch.stack((x * cos - y * sin, x * sin + y * cos), -1)
    if turned is not pairs:
        pairs.copy_(turned)
