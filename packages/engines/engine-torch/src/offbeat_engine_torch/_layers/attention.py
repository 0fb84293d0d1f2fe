"""Attention over packed sequences, registered with transformers under `ATTENTION_NAME`.

Three kernels, each exact; the device says which suits it (`Device.packed_attention`):
- `split`: attention to the own segment and attention to the shared prompt are two calls, joined by their
  log-sum-exps, as ring attention joins its blocks; the backward pass runs the same two calls with the joined
  statistics. No key is ever copied per completion or per query head, and only packed tensors are kept for the backward
  pass.
  Source: FlashAttention-2 (arXiv:2307.08691) for the backward by log-sum-exp, Ring Attention (arXiv:2310.01889).
- `varlen`: torch's variable-length flash attention, sliding windows too; a query's keys are its prompt's and its own,
  aligned at the end. It works on the tensors of a `VarlenKeys` alone, which differ in shape and not in kind from pack
  to pack: so that `torch.compile` makes one graph of a layer for all of them.
- `rows`: padded rows with a mask; every device, head size and sliding window.

For a kernel the segments of a pack become padded rows. Rows of like length share a call. A row is padded by repeating
its last index: under causal attention nothing real sees what comes after it, and what padding computes is thrown
away.

Shapes: T packed tokens, H query heads, J key heads, G = H / J query heads of each, D head size, R rows, L queries and
K keys of a row (padded).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from offbeat_core import ModelError
from offbeat_device import copy_to_device
from offbeat_training import Indices, Segment, VarlenBounds, fits_varlen, varlen_attention

Made = TypeVar("Made")

MAX_PADDING_SHARE = 0.25
MAX_PADDING_TOKENS = 8  # a call costs about as much as this many padded tokens of a small model's rows


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One padded attention call over R rows, those of each key head one after the other.

    Args:
        query: [R * L] int64, packed index of each query. The tokens of key head j have j * T added.
        key: [R * K] int64, packed index of each key, likewise.
        num_rows: R.
        token: [n] int64, packed index of the real queries.
        real: [n] int64, where among R * L they are; None when nothing is padded.
        mask: [R, 1, L, K] bool, which keys a query sees; None when the call itself knows.
    """

    query: Tensor
    key: Tensor
    num_rows: int
    token: Tensor
    real: Tensor | None
    mask: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class VarlenKeys:
    """Places of the keys of each sequence of a pack, for variable-length attention.

    Args:
        index: [sum K] int64, packed index of every sequence's keys; None where these are the packed tokens as they are.
        bounds: where queries and keys of each sequence begin and end.
    """

    index: Tensor | None
    bounds: VarlenBounds


@dataclass(frozen=True, kw_only=True)
class WholeRows:
    """Sequences of a pack with their shared prompts, as rows: those of like length in one block, padded.

    Args:
        indices: [R, L] int64 of each block, packed index of each token. A row ends with its last index, repeated.
        place_T: [T] int64, where each packed token is in all blocks one after the other.
    """

    indices: tuple[Tensor, ...]
    place_T: Tensor


@dataclass(frozen=True, kw_only=True)
class WholeLine:
    """Sequences of a pack with their shared prompts, one after the other in one row of F tokens.

    Args:
        rows: of one block [1, F].
        bounds: [n + 1] int64, where each sequence begins, and F.
        sequence_1F: [1, F] int32, number of each token's sequence.
    """

    rows: WholeRows
    bounds: Tensor
    sequence_1F: Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """Attention of one pack: which tokens attend to which, in each form a kernel may want; made on first use."""

    segments: tuple[Segment, ...]
    device: torch.device
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, its shared prompt included."""
        return max(_prefix_length(self.segments, segment) + segment.length for segment in self.segments)

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(segment.length for segment in self.segments)

    def own(self, num_heads: int) -> list[Rows]:
        """Each segment as a row of its own, causal. Every packed token is a query of each key head exactly once."""
        return self._once(("own", num_heads), lambda: self._own_rows(num_heads))

    def cross(self, num_heads: int) -> list[Rows]:
        """Each parent's tokens as keys and all its children's tokens as queries, everything seen, by key head."""
        return self._once(("cross", num_heads), lambda: self._cross_rows(num_heads))

    def joined(self, window: int | None) -> list[Rows]:
        """Each segment as a row whose keys are its parent's tokens and its own, masked."""
        return self._once(("joined", window), lambda: self._joined_rows(window))

    def arguments(self, kernel: str) -> dict[str, Any]:
        """Return what `packed_attention` is given by name to attend by a kernel."""
        return {"plan": self, "kernel": kernel, "keys": self.varlen() if kernel == "varlen" else None}

    def varlen(self) -> VarlenKeys:
        """Keys of each segment, its parent's and its own, without padding."""
        return self._once("varlen", self._varlen_keys)

    def whole_rows(self) -> WholeRows:
        """Sequences for what reads one from its beginning, as padded rows."""
        return self._once("whole rows", self._whole_rows)

    def whole_line(self) -> WholeLine:
        """Sequences for what reads one from its beginning, without padding."""
        return self._once("whole line", self._whole_line)

    def _once(self, name: Any, make: Callable[[], Made]) -> Made:
        if name not in self._made:
            self._made[name] = make()
        made: Made = self._made[name]
        return made

    def _own_rows(self, num_heads: int) -> list[Rows]:
        spans = [(segment.start, segment.length) for segment in self.segments]
        return [self._rows(bucket, bucket, num_heads=num_heads) for bucket in _buckets(spans)]

    def _cross_rows(self, num_heads: int) -> list[Rows]:
        # Parents of one length alone share a call: without a mask a padded key would be seen.
        by_prompt_length: dict[int, list[tuple[tuple[int, int], tuple[int, int]]]] = {}
        for parent_index, group in groupby(self.segments, key=lambda segment: segment.parent):
            if parent_index >= 0:
                parent, children = self.segments[parent_index], list(group)
                queries = (children[0].start, sum(child.length for child in children))
                by_prompt_length.setdefault(parent.length, []).append((queries, (parent.start, parent.length)))
        blocks: list[Rows] = []
        for pairs in by_prompt_length.values():
            keys = dict(pairs)
            blocks.extend(
                self._rows(bucket, [keys[span] for span in bucket], num_heads=num_heads) for bucket in _buckets(keys)
            )
        return blocks

    def _joined_rows(self, window: int | None) -> list[Rows]:
        owner = {(segment.start, segment.length): segment for segment in self.segments}
        blocks = []
        for bucket in _buckets(owner):
            keys = [_key_indices(self.segments, owner[span]) for span in bucket]
            mask = _joined_mask([length for _, length in bucket], [len(key) for key in keys], window)
            blocks.append(self._rows(bucket, keys, mask))
        return blocks

    def _varlen_keys(self) -> VarlenKeys:
        keys = [_key_indices(self.segments, segment) for segment in self.segments]
        queries = [segment.length for segment in self.segments]
        lengths, index = [len(key) for key in keys], np.concatenate(keys)
        first_query, first_key = (self._tensor(np.cumsum([0, *each]).astype(np.int32)) for each in (queries, lengths))
        return VarlenKeys(
            index=None if np.array_equal(index, np.arange(self.num_tokens)) else self._tensor(index),
            bounds=VarlenBounds(
                queries=first_query, keys=first_key, longest_query=max(queries), longest_key=max(lengths)
            ),
        )

    def _whole_sequences(self) -> list[Indices]:
        parents = {segment.parent for segment in self.segments}
        return [_key_indices(self.segments, each) for number, each in enumerate(self.segments) if number not in parents]

    def _whole_rows(self) -> WholeRows:
        sequences = self._whole_sequences()
        blocks, place_T, begin = [], np.empty(self.num_tokens, np.int64), 0
        for bucket in _buckets([(number, len(each)) for number, each in enumerate(sequences)]):
            index_RL, _ = _pad([sequences[number] for number, _ in bucket])
            for row, (number, length) in enumerate(bucket):
                place_T[sequences[number]] = begin + row * index_RL.shape[1] + np.arange(length)
            blocks.append(self._tensor(index_RL))
            begin += index_RL.size
        return WholeRows(indices=tuple(blocks), place_T=self._tensor(place_T))

    def _whole_line(self) -> WholeLine:
        sequences = self._whole_sequences()
        lengths, index_F = [len(each) for each in sequences], np.concatenate(sequences)
        place_T = np.empty(self.num_tokens, np.int64)
        place_T[index_F] = np.arange(len(index_F))
        number_F = np.repeat(np.arange(len(sequences), dtype=np.int32), lengths)
        return WholeLine(
            rows=WholeRows(indices=(self._tensor(index_F[None]),), place_T=self._tensor(place_T)),
            bounds=self._tensor(np.cumsum([0, *lengths])),
            sequence_1F=self._tensor(number_F[None]),
        )

    def _rows(
        self, queries: Sequence[tuple[int, int]], keys: Sequence[Any], mask: Any = None, num_heads: int = 1
    ) -> Rows:
        query_RL, lengths = _pad([np.arange(start, start + length) for start, length in queries])
        key_RK, _ = _pad([key if isinstance(key, np.ndarray) else np.arange(key[0], key[0] + key[1]) for key in keys])
        flat = query_RL.reshape(-1)
        real = np.flatnonzero((np.arange(query_RL.shape[1])[None] < lengths[:, None]).reshape(-1))
        num_tokens = self.num_tokens
        return Rows(
            query=self._tensor(_for_each_head(flat, num_heads, num_tokens)),
            key=self._tensor(_for_each_head(key_RK.reshape(-1), num_heads, num_tokens)),
            num_rows=num_heads * len(queries),
            token=self._tensor(_for_each_head(flat[real], num_heads, num_tokens)),
            real=None if len(real) == len(flat) else self._tensor(_for_each_head(real, num_heads, len(flat))),
            mask=None if mask is None else self._tensor(mask),
        )

    def _tensor(self, array: Any) -> Tensor:
        return copy_to_device(torch.from_numpy(np.ascontiguousarray(array)), self.device)


def _for_each_head(index: Indices, num_heads: int, step: int) -> Indices:
    """Return the index, and then again with `step` added for each head after the first."""
    return (np.arange(num_heads)[:, None] * step + index).reshape(-1)


def _prefix_length(segments: Sequence[Segment], segment: Segment) -> int:
    return segments[segment.parent].length if segment.parent >= 0 else 0


def _key_indices(segments: Sequence[Segment], segment: Segment) -> Indices:
    own = np.arange(segment.start, segment.start + segment.length)
    if segment.parent < 0:
        return own
    parent = segments[segment.parent]
    return np.concatenate([np.arange(parent.start, parent.start + parent.length), own])


def _buckets(spans: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Put spans (start, length) of like length together, longest first."""
    buckets: list[list[tuple[int, int]]] = []
    longest = 0
    for span in sorted(spans, key=lambda span: (-span[1], span[0])):
        if not buckets or longest - span[1] > max(MAX_PADDING_TOKENS, MAX_PADDING_SHARE * longest):
            buckets.append([])
            longest = span[1]
        buckets[-1].append(span)
    return buckets


def _pad(rows: Sequence[Indices]) -> tuple[Indices, Indices]:
    """Stack index rows to [R, L], each padded with its last index; and their real lengths [R]."""
    lengths = np.array([len(row) for row in rows])
    padded = np.stack([row[np.minimum(np.arange(lengths.max()), len(row) - 1)] for row in rows])
    return padded, lengths


def _joined_mask(queries: Sequence[int], keys: Sequence[int], window: int | None) -> Any:
    """[R, 1, L, K] bool: a query sees keys up to its own place, at most `window` of them. Key places are positions."""
    place_L, place_K = np.arange(max(queries)), np.arange(max(keys))
    offset_R = np.array(keys) - np.array(queries)
    distance_RLK = (place_L[None, :, None] + offset_R[:, None, None]) - place_K[None, None, :]
    seen = distance_RLK >= 0 if window is None else (distance_RLK >= 0) & (distance_RLK < window)
    return seen[:, None]


ATTENTION_NAME = "offbeat_packed"

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def register_attention() -> None:
    """Make the packed attention known to transformers; doing it twice changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)


def packed_attention(
    module: Any,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    plan: AttentionPlan | None = None,
    kernel: str = "rows",
    keys: VarlenKeys | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence of a pack: transformers' attention interface; `plan` takes the place of its mask.

    With `keys`, those of the plan, it attends by `varlen` where that takes the heads, and by `kernel` otherwise.

    Returns:
        [1, T, H, D], and None for the weights.

    Raises:
        ModelError: the model does not hand the plan on, or asks for a soft cap or sinks on the scores, or for a mask.
    """
    if plan is None:
        raise ModelError(f"{type(module).__name__} does not pass arguments on to its attention: family not supported")
    if unused.get("softcap") is not None or unused.get("s_aux") is not None or unused.get("position_bias") is not None:
        raise ModelError(f"{type(module).__name__} caps or biases attention scores: family not supported")
    if attention_mask is not None:  # transformers makes none for this function: the layer has made it itself
        raise ModelError(f"{type(module).__name__} makes its own attention mask: family not supported")
    # `squeeze`, for the backward pass of `x[0]` fills a tensor with zeros first.
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if keys is not None and fits_varlen(query.shape[-1], value.shape[-1], value.dtype):
        query, key = query.to(value.dtype), key.to(value.dtype)
        if keys.index is not None:
            key, value = key.index_select(0, keys.index), value.index_select(0, keys.index)
        out = varlen_attention(query, key, value, keys.bounds, scale=scale, window=sliding_window)
        return out.contiguous()[None], None
    # A window that no sequence exceeds hides nothing, and `split` takes none.
    window = sliding_window if sliding_window is not None and sliding_window < plan.longest else None
    plain = window is None and query.shape[-1] == value.shape[-1]
    if kernel == "split" and plain:
        out = _SplitAttention.apply(query, key, value, plan, scale)  # type: ignore[no-untyped-call]
    else:
        out = _masked_rows(query.to(value.dtype), key.to(value.dtype), value, plan, scale, window)
    return out.to(value.dtype).contiguous()[None], None  # some families cut it with `view`


class _SplitAttention(torch.autograd.Function):
    """Own segment and shared prompt in separate flash calls, joined exactly."""

    @staticmethod
    def forward(
        ctx: Any, query_THD: Tensor, key_TJD: Tensor, value_TJD: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        num_heads = key_TJD.shape[1]
        # The half-precision kernel for processors is 2 to 10 times slower than the float32 one (bench, docs).
        floats = query_THD.dtype if query_THD.dtype == torch.float64 else torch.float32
        query, key, value = (_by_head(x, num_heads, floats) for x in (query_THD, key_TJD, value_TJD))
        out = torch.empty_like(query)  # `own` writes every token once, before `cross` reads any
        total = out.new_empty(out.shape[:2])
        for rows in plan.own(num_heads):
            part, lse = _call(query, key, value, rows, scale, causal=True)
            out.index_copy_(0, rows.token, part)
            total.index_copy_(0, rows.token, lse)
        for rows in plan.cross(num_heads):
            part, lse = _call(query, key, value, rows, scale, causal=False)
            own_lse = total.index_select(0, rows.token)
            # Each part is a softmax over its own keys; its share in the joint one is exp(its lse - the joint lse).
            joined = torch.logaddexp(own_lse, lse)
            own = out.index_select(0, rows.token)
            own.mul_((own_lse - joined).exp_()[..., None]).add_(part.mul_((lse - joined).exp_()[..., None]))
            out.index_copy_(0, rows.token, own)
            total.index_copy_(0, rows.token, joined)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.plan, ctx.scale, ctx.dtypes = plan, scale, [x.dtype for x in (query_THD, key_TJD, value_TJD)]
        return _by_token(out, num_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total = ctx.saved_tensors
        num_heads = len(query) // ctx.plan.num_tokens
        tensors = (query, key, value, _by_head(grads[0], num_heads, query.dtype), out, total)
        # Left open: `own` writes every row of them, and `cross` adds to that.
        grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, key, value))
        for rows in ctx.plan.own(num_heads):
            query_part, *others = _call_backward(tensors, rows, ctx.scale, causal=True)
            grad_query.index_copy_(0, rows.token, _unpad(query_part, rows))
            for whole, part in zip((grad_key, grad_value), others, strict=True):
                # Summed over the query heads, which all read one key head.
                whole.index_copy_(0, rows.token, _unpad(part.sum(1, keepdim=True), rows))
        for rows in ctx.plan.cross(num_heads):
            query_part, *others = _call_backward(tensors, rows, ctx.scale, causal=False)
            grad_query.index_add_(0, rows.token, _unpad(query_part, rows))
            for whole, part in zip((grad_key, grad_value), others, strict=True):
                whole.index_add_(0, rows.key, part.sum(1).flatten(0, 1)[:, None])
        found = zip((grad_query, grad_key, grad_value), ctx.dtypes, strict=True)
        return *(_by_token(grad, num_heads).to(dtype) for grad, dtype in found), None, None


def _by_head(x_THD: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """[T, H, D] to [J * T, G, D], contiguous."""
    x_JTGD = x_THD.reshape(len(x_THD), num_heads, -1, x_THD.shape[2]).transpose(0, 1)
    return x_JTGD.to(dtype, memory_format=torch.contiguous_format).contiguous().flatten(0, 1)


def _by_token(x: Tensor, num_heads: int) -> Tensor:
    """[J * T, G, D] to [T, H, D]."""
    return x.view(num_heads, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


def _repeat(x_TJD: Tensor, heads: int) -> Tensor:
    return x_TJD if heads == 1 else x_TJD.repeat_interleave(heads, 1)


def _gather(x_THD: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """[T, H, D] and [R * L] to [R, H, L, D]."""
    return x_THD.index_select(0, index).view(num_rows, -1, *x_THD.shape[1:]).transpose(1, 2)


def _unpad(x_RHLD: Tensor, rows: Rows) -> Tensor:
    """[R, H, L, D] to the real queries' [n, H, D]."""
    flat = x_RHLD.transpose(1, 2).flatten(0, 1)
    return flat if rows.real is None else flat.index_select(0, rows.real)


def _gather_all(query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [R, G, L, D] of rows, and keys and values [R, G, K, D], which all query heads of a key head read."""
    keys, values = (_gather(x, rows.key, rows.num_rows).expand(-1, query.shape[1], -1, -1) for x in (key, value))
    return _gather(query, rows.query, rows.num_rows), keys, values


def _call(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Make one flash call: output [n, G, D] and log-sum-exp [n, G] of the real queries."""
    out, lse = _flash(*_gather_all(query, key, value, rows), 0.0, causal, scale=scale)
    return _unpad(out, rows), _unpad(lse[..., None], rows)[..., 0]


def _call_backward(
    tensors: tuple[Tensor, ...], rows: Rows, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients [R, G, L, D] of one flash call, under the joined output and log-sum-exp."""
    query, key, value, grad, out, total = tensors
    grad_rows = _gather(grad, rows.query, rows.num_rows)
    if rows.real is not None:  # what padding computes has no gradient
        keep = grad.new_zeros(len(rows.query)).index_fill_(0, rows.real, 1.0)
        grad_rows = grad_rows * keep.view(rows.num_rows, 1, -1, 1)
    parts: tuple[Tensor, Tensor, Tensor] = _flash_backward(
        grad_rows,
        *_gather_all(query, key, value, rows),
        _gather(out, rows.query, rows.num_rows),
        _gather(total[..., None], rows.query, rows.num_rows)[..., 0],
        0.0,
        causal,
        scale=scale,
    )
    return parts


def _masked_rows(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float, window: int | None
) -> Tensor:
    """Padded rows with a mask, differentiated by torch."""
    heads = query.shape[1] // key.shape[1]
    parts, tokens = [], []
    for rows in plan.joined(window):
        out = scaled_dot_product_attention(
            _gather(query, rows.query, rows.num_rows),
            _repeat(_gather(key, rows.key, rows.num_rows), heads),
            _repeat(_gather(value, rows.key, rows.num_rows), heads),
            attn_mask=rows.mask,
            scale=scale,
        )
        parts.append(_unpad(out, rows))
        tokens.append(rows.token)
    # Back into the order of the pack.
    return torch.cat(parts).index_select(0, torch.cat(tokens).argsort())
