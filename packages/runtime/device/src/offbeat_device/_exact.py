"""Exact numerics: the forward pass of a decoder layer in which the bits of a token's numbers depend on its own tokens.

They depend neither on what else is in the batch, nor on a token's place in it, nor on how a sequence is cut into
passes. So a trainer that packs and a sampler that decodes token by token find the same log-probabilities, to the bit.
Residuals, norms, rotations and attention are float32; matrix products take and give the format of the weights.

What makes sums independent of the batch: a product runs over whole tiles of rows; a sum over a row has one order;
attention adds up tiles of 64 keys, counted from the sequence's first, one after the other, and a tile that is not seen
adds zeros. Libraries promise none of it: `check_exact` asks them, for the shapes of a model.

Source of the idea: He et al., "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025.

Shapes: N tokens, I and O sizes of a matrix, E hidden size, H query heads, J key heads, G = H / J, D head size, R rows
of like sequences, L queries and K keys of a row.
"""

import platform
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from offbeat_core import ConfigError

EXACT_FAMILIES: Final = ("qwen3", "qwen2", "llama")
ROW_TILE: Final = 8
"""Rows of a product are filled up to a multiple of it: kernels for single rows add up in another order."""
DEVICE_ROWS: Final = 64
"""Rows of one product on a device with libraries that choose a kernel by the number of rows: always these."""
KEY_TILE: Final = 64
QUERY_BLOCK: Final = 64
MOST_ROWS_ASKED: Final = 8192
"""Rows of a matrix with which `check_exact` asks at most: a vocabulary would take seconds."""
SCORES_AT_A_TIME: Final = 1 << 22
"""Scores of attention in memory at a time: 16 MiB, which processors' caches hold in part."""
PACK_FOR_ROWS: Final = 32


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether weights of this format can be held in oneDNN's layout."""
    is_available: Any = torch.backends.mkldnn.is_available
    on_x86 = platform.machine().lower() in ("x86_64", "amd64")
    if not torch.empty(0, device=device).is_cpu or not on_x86 or not is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack_matrix(weight_OI: Tensor) -> Tensor:
    """Return a weight in oneDNN's layout, in which a product of few rows takes a half to a third of the time.

    As it is where that cannot be. Exact products of small weights take it too: MKL shares them out over many threads in
    other ways than over few.
    """
    if weight_OI.is_mkldnn or not can_pack(weight_OI.device, weight_OI.dtype):
        return weight_OI
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, PACK_FOR_ROWS)
    return packed


def exact_product(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, wide: bool = False) -> Tensor:
    """Return x W^T + b without gradient, [N, O] in the format of the weight.

    Args:
        x_NI: rounded to the format of the weight.
        weight_OI: as `pack_matrix` gives it.
        bias_O: of the same format.
        wide: the sums are not rounded to bfloat16, but given in float32, where the device can do that.
    """
    x_NI = x_NI.to(weight_OI.dtype)
    on_cpu, num_rows = x_NI.is_cpu, len(x_NI)
    padded = F.pad(x_NI, (0, 0, 0, -num_rows % (ROW_TILE if on_cpu else DEVICE_ROWS)))
    if weight_OI.is_mkldnn:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.default(padded, weight_OI, bias_O, "none", [], "")
        return y[:num_rows]
    if on_cpu:
        return F.linear(padded, weight_OI, bias_O)[:num_rows]
    rows = [padded[at : at + DEVICE_ROWS] for at in range(0, len(padded), DEVICE_ROWS)]
    if wide and weight_OI.dtype != torch.float32 and bias_O is None:
        tiles = [torch.mm(each, weight_OI.t(), out_dtype=torch.float32) for each in rows]
    else:
        tiles = [F.linear(each, weight_OI, bias_O) for each in rows]
    return torch.cat(tiles)[:num_rows] if tiles else padded.new_empty(0, len(weight_OI))


def exact_head(weight_VE: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a vocabulary head for `exact_product` with `wide`: its weights rounded to `dtype`.

    Its logits are not rounded: processors multiply in float32, devices add products of bfloat16 up in it.
    """
    rounded = weight_VE.to(dtype)
    return pack_matrix(rounded.float()) if weight_VE.is_cpu else rounded


def trained_product(x_NI: Tensor, make: Callable[..., tuple[Tensor, Tensor | None]], *tensors: Tensor) -> Tensor:
    """`exact_product` of a matrix that is made of tensors that train, with gradients.

    It is made anew in the backward pass, so nothing but these and the activation is kept.

    Args:
        x_NI: any format.
        make: of the tensors, the weight [O, I] in the format of the product, and the bias; differentiable.
        *tensors: as they are held.
    """
    y: Tensor = _Product.apply(x_NI, make, *tensors)  # type: ignore[no-untyped-call]
    return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Any, *tensors: Tensor) -> Tensor:
        weight, bias = make(*tensors)
        rounded = x.to(weight.dtype)
        ctx.save_for_backward(rounded, *tensors)
        ctx.make, ctx.dtype = make, x.dtype
        return exact_product(rounded, pack_matrix(weight), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        grad, needed = grads[0].to(x.dtype), ctx.needs_input_grad[2:]
        leaves = [each.detach().requires_grad_(is_needed) for each, is_needed in zip(tensors, needed, strict=True)]
        with torch.enable_grad():
            made = [each for each in ctx.make(*leaves) if each is not None]
        grad_x = (grad @ made[0].detach()).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        of_made = ((grad.t() @ x) if each.ndim == 2 else grad.sum(0) for each in made if each.requires_grad)
        trained = [each for each in made if each.requires_grad]
        wanted = [each for each in leaves if each.requires_grad]
        found = iter(torch.autograd.grad(trained, wanted, list(of_made)) if wanted else ())
        return grad_x, None, *(next(found) if is_needed else None for is_needed in needed)


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, [..., E] to [...], in an order that is the same for every row of any batch."""
    if x.is_cpu:
        rows = x.reshape(-1, x.shape[-1])
        # A lone row is the one that several threads share out, which is another order; two of it are not.
        return rows.expand(2, -1).sum(-1)[:1].view(x.shape[:-1]) if len(rows) == 1 else x.sum(-1)
    return _folded(x)


def _folded(x: Tensor) -> Tensor:
    """Sum by additions of one half to the other: libraries of devices choose an order by the number of rows."""
    while (size := x.shape[-1]) > 1:
        half = size // 2
        folded = x[..., :half] + x[..., size - half :]
        x = torch.cat((folded, x[..., half : half + 1]), -1) if size % 2 else folded
    return x[..., 0]


def exact_norm(x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """RMS norm, [..., E] float32 of an activation and a weight of any format, with gradients."""

    def native(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps)

    return _alike(lambda x, weight: _norm(x.float(), weight.float(), eps), native, x_NE, weight_E)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = row_sum(x.square()).div_(x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x, scale[..., None]).mul_(weight)


def exact_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, float32 of any format, with gradients."""

    def native(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate.float()) * up.float()

    return _alike(_swiglu, native, gate, up)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.float(), up.float()
    # torch's silu has two kernels, for the bulk of a tensor and for its end, which round differently.
    return gate / gate.neg().exp_().add_(1) * up


def exact_rotation(x_NHD: Tensor, rotations_NC2: Tensor) -> Tensor:
    """Turn element i of a head with element i + D / 2 by position, as Hugging Face pairs them; float32."""
    (x, y), (cos, sin) = x_NHD.chunk(2, -1), rotations_NC2[:, None].unbind(-1)
    return torch.cat((x * cos - y * sin, y * cos + x * sin), -1)


def exact_logsumexp(logits_BV: Tensor) -> Tensor:
    """[B] of float32 logits; never below a row's largest."""
    top_B1 = logits_BV.amax(-1, keepdim=True)
    return row_sum((logits_BV - top_B1).exp_()).log_() + top_B1[:, 0]


@torch.no_grad()
def exact_attention(
    query_RHLD: Tensor, key_RJKD: Tensor, value_RJKD: Tensor, starts: Sequence[int], scale: float
) -> Tensor:
    """Causal attention over rows of keys that begin with the first of a sequence, [R, H, L, D] float32.

    Args:
        query_RHLD: of any format, as the others. A row may be padded at its end: what comes of padding is finite.
        key_RJKD: those that no query sees are finite.
        value_RJKD: likewise.
        starts: of each row, how many keys come before the one of its first query.
        scale: of the scores.
    """
    size = key_RJKD.shape[2]
    if missing := -size % KEY_TILE:
        key_RJKD, value_RJKD = (F.pad(each, (0, 0, 0, missing)) for each in (key_RJKD, value_RJKD))
    num_rows, num_heads, length, _ = query_RHLD.shape
    out = torch.empty_like(query_RHLD, dtype=torch.float32)
    most = max(SCORES_AT_A_TIME // (num_heads * min(length, QUERY_BLOCK) * size), 1)
    for row in range(0, num_rows, most):
        rows, first = slice(row, row + most), starts[row : row + most]
        for begin in range(0, length, QUERY_BLOCK):
            queries = query_RHLD[rows, :, begin : begin + QUERY_BLOCK]
            seen = min(max(first) + begin + queries.shape[2], size)
            places = [start + begin for start in first]
            part = _attend(queries.float() * scale, key_RJKD[rows], value_RJKD[rows], places, -(-seen // KEY_TILE))
            out[rows, :, begin : begin + QUERY_BLOCK] = part
    return out


def _attend(query_RHLD: Tensor, key_RJKD: Tensor, value_RJKD: Tensor, places: Sequence[int], num_tiles: int) -> Tensor:
    """Attend to some tiles of keys; the query heads of a key head are rows of one product."""
    num_rows, num_heads, length, size = query_RHLD.shape
    num_keys = key_RJKD.shape[1]
    batch, heads = num_rows * num_keys, num_heads // num_keys
    queries = F.pad(query_RHLD.reshape(batch, heads * length, size), (0, 0, 0, -heads * length % ROW_TILE))
    device = queries.device
    keys, values = (
        [each[:, :, at * KEY_TILE : (at + 1) * KEY_TILE].reshape(batch, KEY_TILE, size) for at in range(num_tiles)]
        for each in (key_RJKD, value_RJKD)
    )
    scores = queries.new_empty(num_tiles, *queries.shape[:2], KEY_TILE)  # a tile lies together, whatever their number
    for at, tile in enumerate(keys):
        torch.bmm(queries, tile.float().transpose(1, 2), out=scores[at])
    hidden = _hidden(tuple(places), heads, length, queries.shape[1], num_tiles, device)
    scores.view(num_tiles, num_rows, num_keys, -1, KEY_TILE).masked_fill_(hidden, -torch.inf)
    weights = scores.sub_(scores.amax(-1).amax(0)[..., None]).exp_()
    sums = row_sum(weights)
    total, out = sums[0], torch.bmm(weights[0], values[0].float())
    for at in range(1, num_tiles):
        total = total + sums[at]
        out = torch.baddbmm(out, weights[at], values[at].float())
    return (out / total[..., None])[:, : heads * length].reshape(query_RHLD.shape)


@lru_cache(maxsize=8)
def _hidden(
    places: tuple[int, ...], heads: int, length: int, num_queries: int, num_tiles: int, device: torch.device
) -> Tensor:
    """[tiles, R, 1, queries, keys] bool, which keys a query does not see; all layers of a pass ask for the same."""
    last_RL = torch.tensor(places, device=device)[:, None] + torch.arange(length, device=device)
    last = F.pad(last_RL.repeat(1, heads), (0, num_queries - heads * length))
    place = torch.arange(num_tiles * KEY_TILE, device=device).view(num_tiles, 1, 1, 1, KEY_TILE)
    return place > last[:, None, :, None]


def exact_with_gradient_of(exact: Callable[..., Tensor], native: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return what `exact` gives, with the gradient of `native`, which computes the same but for rounding.

    Its forward pass runs again in the backward pass, so nothing but the inputs is kept.
    """
    y: Tensor = _Alike.apply(exact, native, *inputs)  # type: ignore[no-untyped-call]
    return y


def _alike(exact: Callable[..., Tensor], native: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    if torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
        return exact_with_gradient_of(exact, native, *inputs)
    return exact(*inputs)


class _Alike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Any, native: Any, *inputs: Tensor) -> Tensor:
        ctx.native = native
        ctx.save_for_backward(*inputs)
        y: Tensor = exact(*inputs)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        inputs = [x.detach().requires_grad_(wants) for x, wants in zip(ctx.saved_tensors, wanted, strict=True)]
        with torch.enable_grad():
            y = ctx.native(*inputs)
        found = iter(torch.autograd.grad(y, [x for x in inputs if x.requires_grad], grads[0].to(y.dtype)))
        return None, None, *(next(found) if wants else None for wants in wanted)


Product = Callable[[Tensor], Tensor]


class ExactLayer(NamedTuple):
    """Weights of a decoder layer: norms [E] and [D], and products with its matrices, of which `qkv` is one.

    `query_norm` and `key_norm` are None in families without; `dtype` is that of the products.
    """

    input_norm: Tensor
    qkv: Product
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Product
    mlp_norm: Tensor
    gate: Product
    up: Product
    down: Product
    num_heads: int
    num_kv_heads: int
    eps: float
    dtype: torch.dtype


def exact_layer(x_NE: Tensor, layer: ExactLayer, rotations_NC2: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """Run one layer of a pre-norm decoder with grouped queries and SwiGLU, with gradients where `attend` has them.

    Args:
        x_NE: float32.
        layer: its weights.
        rotations_NC2: [N, D / 2, 2] float32, cosine and sine.
        attend: takes queries, keys and values [N, H + 2 J, D], positions applied, to [N, H * D].

    Returns:
        [N, E] float32.
    """
    mixed = layer.qkv(exact_norm(x_NE, layer.input_norm, layer.eps))
    heads = torch.unflatten(mixed, -1, (layer.num_heads + 2 * layer.num_kv_heads, -1))
    parts = torch.split(heads, [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], 1)
    query, key = (
        each.float() if weight is None else exact_norm(each, weight, layer.eps)
        for each, weight in zip(parts[:2], (layer.query_norm, layer.key_norm), strict=True)
    )
    qkv = torch.cat((exact_rotation(torch.cat((query, key), 1), rotations_NC2), parts[2]), 1)
    x_NE = x_NE + layer.out(attend(qkv.to(layer.dtype)))
    h = exact_norm(x_NE, layer.mlp_norm, layer.eps)
    return x_NE + layer.down(exact_swiglu(layer.gate(h), layer.up(h)))


def check_exact_family(family: str) -> None:
    """Refuse models whose layers are not `exact_layer`.

    Raises:
        ConfigError: with the families that are.
    """
    if family not in EXACT_FAMILIES:
        raise ConfigError(
            f'numerics = "exact" computes the families {", ".join(EXACT_FAMILIES)}, and this model is of {family}: set '
            'numerics = "native"'
        )


@torch.no_grad()
def check_exact(
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, int]],
    head_dim: int,
    *,
    head: tuple[int, int],
) -> None:
    """Ask the libraries of a device whether a row's bits depend on others, for the matrices of a model.

    Args:
        device: that will compute.
        dtype: of the products.
        shapes: (out, in) of the layers' matrices.
        head_dim: of attention.
        head: (out, in) of the vocabulary head.

    Raises:
        ConfigError: they do.
    """
    draw, found = torch.Generator().manual_seed(0), list[str]()
    for shape in sorted({*shapes, head}):
        weight, x = (torch.randn(n, shape[1], generator=draw).to(device) for n in (min(shape[0], MOST_ROWS_ASKED), 100))
        ready = exact_head(weight, dtype) if shape == head else pack_matrix(weight.to(dtype))
        whole = exact_product(x, ready, wide=shape == head)
        cuts = (slice(0, 1), slice(3, 20), slice(99, 100))
        if not all(torch.equal(exact_product(x[cut], ready, wide=shape == head), whole[cut]) for cut in cuts):
            found.append(f"products with a matrix of {shape[0]} x {shape[1]}")
    query, key, value = (torch.randn(3, 2, 80, head_dim, generator=draw).to(device) for _ in range(3))
    seen = exact_attention(query, key, value, [0, 0, 0], 1.0)[1:2, :, 70:71]
    if not torch.equal(exact_attention(query[1:2, :, 70:71], key[1:2], value[1:2], [70], 1.0), seen):
        found.append(f"attention over heads of {head_dim}")
    if found:
        raise ConfigError(
            f'numerics = "exact" needs products whose rows do not depend on others, and on {device} in {dtype} these '
            f'do: {", ".join(found)}; set numerics = "native"'
        )
