"""Packed attention and sliding windows beside plain attention with masks, forward and backward.

The kernel is the one that the device asks for (`Device.packed_attention`). The yardstick is torch's scaled-dot-product
attention over the whole pack in float32, masked by the tokens that each one sees; inputs are the same rounded values.
A sink is one more key there, without a value, whose score stands in the mask.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpu.piece import Figures, Place, main, require_close
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from offbeat_engine_torch._layers.attention import packed_attention
from offbeat_engine_torch._layers.plan import AttentionPlan
from offbeat_training import Segment

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Bounds of outputs, and of gradients relative to the largest: bfloat16 keeps 8 bits of what is added up."""


class Shape(NamedTuple):
    """Heads of queries and of keys, size of a head, the most keys that a query sees (None: all before it), sinks."""

    queries: int
    keys: int
    size: int
    window: int | None
    has_sinks: bool = False


class Inputs(NamedTuple):
    """[1, H, T, D] and [1, K, T, D] twice, then sinks [H] in float32, if any; and a gradient [1, T, H, D]."""

    leaves: tuple[Tensor, ...]
    grad: Tensor


def pack(num_prompts: int, num_samples: int, num_tokens: int) -> tuple[Segment, ...]:
    """Make prompts and continuations of each, of different lengths."""
    segments: list[Segment] = []
    start = 0

    def add(length: int, parent: int) -> None:
        nonlocal start
        segments.append(Segment(start=start, length=length, parent=parent))
        start += length

    for number in range(num_prompts):
        at = len(segments)
        add(num_tokens - 3 * number, -1)
        for sample in range(num_samples):
            add(num_tokens // 2 + 5 * sample + number, at)
    return tuple(segments)


def mask_of(segments: tuple[Segment, ...], window: int | None, device: torch.device) -> Tensor:
    """Return a [T, T] bool: which tokens each token attends to."""
    total = segments[-1].start + segments[-1].length
    owner, place, parent = (torch.zeros(total, dtype=torch.long) for _ in range(3))
    for index, segment in enumerate(segments):
        span = slice(segment.start, segment.start + segment.length)
        prefix = segments[segment.parent].length if segment.parent >= 0 else 0
        owner[span], parent[span] = index, segment.parent
        place[span] = prefix + torch.arange(segment.length)
    related = (owner[:, None] == owner[None]) | (parent[:, None] == owner[None])
    distance = place[:, None] - place[None]
    seen = related & (distance >= 0)
    return (seen if window is None else seen & (distance < window)).to(device)


def make_inputs(shape: Shape, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Draw normal numbers."""
    draw = torch.Generator().manual_seed(0)
    sizes = [(1, heads, num_tokens, shape.size) for heads in (shape.queries, shape.keys, shape.keys)]
    drawn = [torch.randn(size, generator=draw) for size in (*sizes, (1, num_tokens, shape.queries, shape.size))]
    *leaves, grad = (each.to(device, dtype) for each in drawn)
    sinks = [torch.linspace(-2, 4, shape.queries, device=device)] if shape.has_sinks else []
    return Inputs((*leaves, *sinks), grad)


def results(attend: Callable[..., Tensor], inputs: Inputs) -> list[Tensor]:
    """Return output and gradients in float32."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs.leaves]
    out = attend(*leaves)
    out.backward(inputs.grad.to(out.dtype))  # type: ignore[no-untyped-call]
    return [each.detach().float() for each in (out, *(leaf.grad for leaf in leaves if leaf.grad is not None))]


def plain(mask_TT: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Compute [1, T, H, D] by the yardstick."""
    heads = query.shape[1] // key.shape[1]
    key, value = (each.float().repeat_interleave(heads, 1) for each in (key, value))
    mask = mask_TT
    if sinks is not None:
        key, value = (pad(each, (0, 0, 0, 1)) for each in (key, value))
        hidden_TT = torch.zeros_like(mask_TT, dtype=torch.float32).masked_fill(~mask_TT, -torch.inf)
        score_HT = sinks[:, None].expand(-1, len(mask_TT))
        mask = torch.cat([hidden_TT.expand(len(sinks), -1, -1), score_HT[..., None]], -1)
    out = scaled_dot_product_attention(query.float(), key, value, attn_mask=mask)
    return out.transpose(1, 2)


def compare(shape: Shape, segments: tuple[Segment, ...], place: Place, dtype: torch.dtype) -> float:
    """Return the largest error of the output and of the gradients, the latter relative to the largest entry."""
    device = place.device.torch_device
    num_tokens = segments[-1].start + segments[-1].length
    inputs = make_inputs(shape, num_tokens, dtype, device)
    plan, mask_TT = AttentionPlan(segments, device), mask_of(segments, shape.window, device)

    def packed(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        how: dict[str, Any] = {**plan.arguments(place.device.packed_attention), "sliding_window": shape.window}
        return packed_attention(None, query, key, value, s_aux=sinks, **how)[0]

    wanted = results(lambda *tensors: plain(mask_TT, *tensors), inputs)
    found = results(packed, inputs)
    errors = [float((a - b).abs().max() / max(1.0, float(b.abs().max()))) for a, b in zip(found, wanted, strict=True)]
    return max(errors)


def time_of(shape: Shape, segments: tuple[Segment, ...], place: Place, dtype: torch.dtype, kernel: str) -> float:
    """Return the milliseconds of a forward and a backward pass."""
    device = place.device.torch_device
    inputs = make_inputs(shape, segments[-1].start + segments[-1].length, dtype, device)
    plan = AttentionPlan(segments, device)
    how: dict[str, Any] = {**plan.arguments(kernel), "sliding_window": shape.window}
    return 1e3 * place.seconds(lambda: results(lambda *each: packed_attention(None, *each, **how)[0], inputs))


def run(place: Place) -> Figures:
    """Compare shapes, then time a pack of 8,192 tokens by its kernel and by padded rows with masks."""
    torch.set_float32_matmul_precision("highest")
    dtype = torch.bfloat16 if place.is_accelerator else torch.float32
    segments = pack(3, 4, place.pick(24, 300))
    figures: dict[str, float] = {}
    for queries, keys, size, sinks in ((8, 8, 64, False), (16, 2, 128, False), (6, 3, 72, False), (16, 2, 64, True)):
        for window in (None, place.pick(11, 127)):
            of_sinks = " with sinks" if sinks else ""
            name = f"error {queries}/{keys} heads of {size}{of_sinks}" + (f", window {window}" if window else "")
            error = compare(Shape(queries, keys, size, window, sinks), segments, place, dtype)
            figures[name] = require_close(name, error, BOUNDS[dtype])
    long = tuple(Segment(start=n * place.pick(64, 2048), length=place.pick(64, 2048)) for n in range(4))
    for window in (None, place.pick(16, 512)):
        shape, suffix = Shape(16, 8, 128, window), f", window {window}" if window else ""
        for kernel in (place.device.packed_attention, "rows"):
            name = f"ms by {kernel}, 4 x {long[0].length} tokens{suffix}"
            figures[name] = time_of(shape, long, place, dtype, kernel)
    return figures


if __name__ == "__main__":
    main(run)
