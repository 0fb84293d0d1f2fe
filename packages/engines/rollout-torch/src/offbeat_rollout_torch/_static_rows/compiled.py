"""Steps of static rows whose small operators are compiled by torch.compile: few kernels between two products.

Products stay as they are. What lies between them is a function of tensors, the weights among them, so that one graph
serves all layers, and another any number of rows; one row has graphs of its own. Attention reads each row up to its own
place (see `length_attention`), and so the places of the longest row make no shapes. Passes of prompts have three graphs
of their own, for what comes before the first layer, the storing of heads, and attention. Graphs are made when the
engine is made, and never while work is recorded.

Compiled, sums within a kernel are not rounded to the format of the weights, so log-probabilities differ by that
rounding. Draws are made from float32 and differ from those of `draw_rows` where a uniform number lies within float32's
rounding of a border between two tokens.

Shapes: B rows of a step, or tokens of a pass (Z segments of T tokens), E hidden size, H query heads, K kv heads, D
head_dim, C places, S rows of the cache, I intermediate size, V vocabulary.
"""

import logging
import time
from collections.abc import Callable
from functools import cache, partial
from subprocess import SubprocessError
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from offbeat_core import ConfigError, SamplingParams
from offbeat_device import Device, compiled, prepare_compiler
from offbeat_rollout_torch._cache import SMALLEST_CAPACITY, Block
from offbeat_rollout_torch._decoder import DecoderWeights, LayerWeights
from offbeat_rollout_torch._families import rotations
from offbeat_rollout_torch._sampling import row_numbers
from offbeat_rollout_torch._static_rows.decoder import PlainStep, StaticAttention, draw_next, places_mask
from offbeat_rollout_torch._static_rows.length_attention import (
    SPLITS,
    attend_by_length,
    attend_segments,
    choose_splits,
    count_listed,
    segment_blocks,
    split_blocks,
)
from offbeat_rollout_torch._static_rows.prefill import EMPTY, SEGMENT_TOKENS, Layout, Segment

log = logging.getLogger(__name__)

TRIED_ROWS: Final = (1, 5)
"""Numbers of rows that graphs are made for: one, and any other. Five is no size of a model: torch takes sizes that are
equal when a graph is made for one size, and makes another graph where they differ."""
TRIED_STEPS: Final = 4
TRIED_PLACES: Final = 5 * SMALLEST_CAPACITY
"""Places of a tried row: three blocks of keys, the last half full. Of neither are there as many as rows, see above."""
TRIED_DISTANCE: Final = 126
"""Distance of places that tried rows begin at, so that steps cross the border of a block of keys."""
TRIED_SEGMENTS: Final = ((0, 70, 64), (0, 134, 9), (2, 0, 30))
"""Slot, start and tokens of tried segments: a prompt that is continued, across the border of a block of keys, by two,
and one that begins. An empty one follows. For their number see TRIED_ROWS."""
TOLERANCE_NATS: Final = {torch.float32: 0.01, torch.bfloat16: 0.5, torch.float16: 0.1}
"""By the format of the weights, as for the trainer's layers (offbeat-engine-torch, `TOLERANCE_NATS`): rounding alone is
below a tenth of it, and a forgotten rotation, place or weight far above."""
MESSAGE_CHARACTERS: Final = 300
"""Length to which a compiler's message is cut, which may be a page."""
TOLERANCE_OF_DRAWS_NATS: Final = 1e-3
"""Bound for the log-probability of a drawn token, made in float32 from the same logits."""


def choose_step(wanted: str, weights: DecoderWeights, device: Device) -> PlainStep:
    """Return the compiled step where it is wanted and computes what the plain one does; else that one.

    Args:
        wanted: option `compile_steps`.
        weights: frozen.
        device: where they lie.

    Raises:
        ConfigError: the option is "on", and steps cannot be compiled.
    """
    if wanted == "off" or (wanted == "auto" and device.work_graphs() is None):
        return PlainStep()
    problem, began_s = device.compiler_lacks(), time.monotonic()
    if not problem:
        prepare_compiler()
        # A processor's kernel splits keys itself.
        splits = SPLITS if device.work_graphs() is not None else SPLITS[:1]
        problem, step = _try(partial(_try_decoding, weights, splits)), CompiledStep(splits)
        if problem:
            log.warning("decoding steps attend with a mask, which is slower: %s", problem)
            problem, step = _try(partial(_try_decoding, weights, ())), CompiledStep()
    if problem and wanted == "on":
        raise ConfigError(f"option compile_steps is on, and decoding steps cannot be compiled: {problem}; use auto")
    if problem:
        log.warning("decoding steps run uncompiled, which is slower: %s", problem)
        return PlainStep()
    if step.by_length and device.work_graphs() is not None:
        if problem := _try(partial(_try_prefill, weights)):
            log.warning("prompts run uncompiled, which is slower: %s", problem)
        else:
            step = CompiledStep(splits, prefills=True)
    log.info("steps compiled in %.0f s", time.monotonic() - began_s)
    return step


def _try(tried: Callable[[], str]) -> str:
    """Run steps both ways; what goes wrong, "" for nothing."""
    try:
        return tried()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, OSError, SubprocessError) as error:  # of torch's tracer, of its compiler, or of a kernel
        return f"{type(error).__name__}: {' '.join(str(error).split())[:MESSAGE_CHARACTERS]}"


def _try_decoding(weights: DecoderWeights, splits: tuple[int, ...]) -> str:
    # Every number of splits for many rows; one row has the one that it always has.
    tried = [CompiledStep((n,)) for n in splits] or [CompiledStep()]
    for num_rows in TRIED_ROWS:
        wanted = _try_steps(PlainStep(), weights, num_rows)
        for step in [CompiledStep(splits)] if num_rows == 1 else tried:
            if problem := _differ(_try_steps(step, weights, num_rows), wanted, weights):
                return problem
        if not (apart := _try_draws(wanted[-1].clone())) <= TOLERANCE_OF_DRAWS_NATS:
            return f"drawn tokens have other log-probabilities, {apart:.2g} nats apart"
    return ""


def _try_prefill(weights: DecoderWeights) -> str:
    wanted, found = (_try_segments(step, weights) for step in (PlainStep(), CompiledStep(SPLITS, prefills=True)))
    return _differ(found, wanted, weights)


def _differ(found_V: Tensor, wanted_V: Tensor, weights: DecoderWeights) -> str:
    """Compare logits [..., V]; how far they are apart, "" for no farther than rounding has them."""
    bound = TOLERANCE_NATS[weights.dtype]
    apart = float((found_V.log_softmax(-1) - wanted_V.log_softmax(-1)).abs().max())
    return "" if apart <= bound else f"other log-probabilities, {apart:.2g} nats apart ({bound} allowed)"


def _try_steps(step: PlainStep, weights: DecoderWeights, num_rows: int) -> Tensor:
    """[steps, rows, V] logits of rows that begin at places far apart, behind noise, for tokens that are given."""
    a, (block, table) = weights.architecture, _tried_inputs(weights, num_rows + 2)
    first, seen = torch.arange(num_rows, device=table.device), []
    begin = (first + 1) * TRIED_DISTANCE % (TRIED_PLACES - TRIED_STEPS)
    for number in range(TRIED_STEPS):
        ids = (first * TRIED_STEPS + number) % a.vocab_size
        columns = torch.stack((ids, begin + number, first, first))
        seen.append(step.logits(weights, columns, table, block, TRIED_PLACES))
    return torch.stack(seen)


def _try_segments(step: PlainStep, weights: DecoderWeights) -> Tensor:
    """[rows, V] logits of a decoding step, which is plain, behind segments of tokens that are given."""
    vocabulary, (block, table) = weights.architecture.vocab_size, _tried_inputs(weights, TRIED_ROWS[-1] + 2)
    segments = [Segment(slot, start, [(start + i) % vocabulary for i in range(n)]) for slot, start, n in TRIED_SEGMENTS]
    numbers = torch.tensor([each.numbers() for each in (*segments, EMPTY)], device=table.device)
    step.prefill(weights, numbers, table, block, TRIED_PLACES, TRIED_PLACES - 1)
    ends = torch.zeros(TRIED_ROWS[-1], dtype=torch.int64, device=table.device)
    for segment in segments:
        ends[segment.slot] = segment.end
    columns = torch.stack((ends % vocabulary, ends, ends, ends))
    return PlainStep().logits(weights, columns, table, block, TRIED_PLACES)


def _tried_inputs(weights: DecoderWeights, num_rows: int) -> tuple[Block, Tensor]:
    """Return rows full of noise, and rotations; of sizes that differ, as those of steps may: see TRIED_ROWS."""
    a, like = weights.architecture, weights.final_norm
    block, table = Block(num_rows, TRIED_PLACES, a, like), rotations(a, TRIED_PLACES + 3).to(like.device)
    block.kv.normal_(generator=torch.Generator(like.device).manual_seed(0))
    return block, table


def _try_draws(logits_BV: Tensor) -> float:
    """Return how far the log-probabilities of compiled draws are from those of their tokens."""
    num_rows, device = len(logits_BV), logits_BV.device
    numbers = torch.tensor(row_numbers(SamplingParams(), logits_BV.shape[-1]), device=device)
    # Columns of wider tensors, as those of steps are: others would have a graph of their own.
    params = numbers[:, None].repeat(1, num_rows + 2)[:, :num_rows]
    columns = torch.arange(num_rows + 2, device=device).repeat(4, 1)[:, :num_rows]
    after, logprobs = CompiledStep().draw(logits_BV, params, columns, SMALLEST_CAPACITY, is_cut=False)
    wanted = logits_BV.log_softmax(-1).gather(-1, after[:1].t())[:, 0]
    return float((logprobs - wanted).abs().max())


class CompiledStep(PlainStep):
    """A step of generated kernels; a draw with a cut, which sorts, is not compiled.

    Args:
        splits: see `choose_splits`; empty: attention is masked, over the places of the longest row.
        prefills: passes of prompts are compiled, too, and attend by length.
    """

    def __init__(self, splits: tuple[int, ...] = (), *, prefills: bool = False) -> None:
        self._splits, self.by_length, self.prefills_by_length = splits, bool(splits), prefills

    def logits(
        self, weights: DecoderWeights, numbers_4B: Tensor, rotations_PC2: Tensor, block: Block, num_places: int
    ) -> Tensor:
        a, head = weights.architecture, weights.head
        assert head is not None
        ids_B, places_B = numbers_4B[0], numbers_4B[1]
        table, first = _fixed(weights.embedding, 0), _fixed(weights.layers[0].input_norm, 0)
        splits = choose_splits(len(ids_B), a.num_kv_heads, self._splits) if self.by_length else 0
        x, h, turns, *seen = _fast(begin_rows)(
            ids_B, places_B, table, _fixed(rotations_PC2), num_places, first, a.norm_eps, a.num_kv_heads, splits
        )
        attention: StaticAttention | LengthAttention
        attention = LengthAttention(block, *seen) if splits else StaticAttention(block, places_B, num_places, a, *seen)
        h = _run_layers(weights, block, Tokens(x, h, turns, places_B), attention)
        return head.in_float32(h)

    def prefill(
        self,
        weights: DecoderWeights,
        numbers_ZF: Tensor,
        rotations_PC2: Tensor,
        block: Block,
        num_places: int,
        last_place: int,
    ) -> None:
        if not self.prefills_by_length:
            super().prefill(weights, numbers_ZF, rotations_PC2, block, num_places, last_place)
            return
        a, listed = weights.architecture, count_listed(block)
        table, first = _fixed(weights.embedding, 0), _fixed(weights.layers[0].input_norm, 0)
        sizes = a.num_heads, a.num_kv_heads, block.capacity, listed
        x, h, turns, places_B, rows_B, *seen = _fast(begin_segments)(
            _fixed(numbers_ZF), table, _fixed(rotations_PC2), last_place, first, a.norm_eps, *sizes
        )
        _run_layers(
            weights, block, Tokens(x, h, turns, places_B, rows_B), SegmentLengthAttention(block, *seen), draws=False
        )

    def draw(
        self, logits_BV: Tensor, params_6B: Tensor, numbers_4B: Tensor, last_place: int, *, is_cut: bool
    ) -> tuple[Tensor, Tensor]:
        if is_cut:
            return super().draw(logits_BV, params_6B, numbers_4B, last_place, is_cut=True)
        drawn: tuple[Tensor, Tensor] = _fast(draw_next)(
            _fixed(logits_BV), params_6B, numbers_4B, last_place, is_cut=False
        )
        return drawn


class Tokens(NamedTuple):
    """Tokens of a step or pass before the first layer.

    Args:
        x_BE: hidden states.
        h_BE: normalised for the first layer.
        turns_B2D: see `begin_rows`.
        places_B: int64 place of each in its row.
        rows_B: int64, of each; None: the first B, in their order.
    """

    x_BE: Tensor
    h_BE: Tensor
    turns_B2D: Tensor
    places_B: Tensor
    rows_B: Tensor | None = None


def _run_layers(
    weights: DecoderWeights,
    block: Block,
    tokens: Tokens,
    attention: "StaticAttention | LengthAttention | SegmentLengthAttention",
    *,
    draws: bool = True,
) -> Tensor:
    """Return hidden states [B, E], normalised for the head; without a draw only keys and values are of use."""
    a, head = weights.architecture, weights.head
    assert head is not None
    x, h, turns, places_B, rows_B = tokens
    # Each norm is one kernel with the sum before it, so a layer ends with the norm of the next.
    next_norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.final_norm]
    for index, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
        kv = _fixed(block.kv[index], 0, 2, 4)
        qkv, qk_norm = _fixed(layer.qkv(h)), _fixed(layer.qk_norm, 0, 1)
        queries = _fast(store_heads)(qkv, qk_norm, turns, kv, places_B, rows_B, a.norm_eps, a.qk_norm)
        if next_norm is weights.final_norm and not draws:
            break
        mixed = layer.out(attention.attend(index, queries))
        x, h = _add_norm(x, mixed, layer.mlp_norm, a.norm_eps, x.dtype)
        dtype = head.input_dtype if next_norm is weights.final_norm else x.dtype
        x, h = _add_norm(x, layer.down(_gated(layer, h)), next_norm, a.norm_eps, dtype)
    return h


class LengthAttention:
    """One new token for each of the first B rows of a block, see `attend_by_length`.

    Args:
        block: of the rows.
        places_R: see `split_blocks`, as the others.
        counts_RN: likewise.
        blocks_RNM: likewise.
    """

    def __init__(self, block: Block, places_R: Tensor, counts_RN: Tensor, blocks_RNM: Tensor) -> None:
        self._block, self._seen = block, (places_R, _fixed(counts_RN, 1), _fixed(blocks_RNM, 1))

    def attend(self, layer: int, queries_BHD: Tensor) -> Tensor:
        """[B, H, D] to [B, H * D], where keys and values of these tokens are stored."""
        B, _, D = queries_BHD.shape
        # Views made here, as inputs of the graph: the kernel for processors takes no others, or copies all keys.
        keys, values = (_fixed(each.flatten(0, 1)[:, None], 1, 3) for each in self._block.kv[layer, :, :B])
        queries = _fixed(queries_BHD.view(len(keys), 1, -1, D))
        out: Tensor = _fast(attend_by_length)(queries, keys, values, *self._seen)
        return out.view(B, -1)


class SegmentLengthAttention:
    """Tokens of the segments of a pass, see `attend_segments`.

    Args:
        block: of the rows.
        places_ZT: see `attend_segments`.
        first_ZH: see `segment_blocks`, as the others.
        counts_ZH1: likewise.
        blocks_ZH1M: likewise.
    """

    def __init__(
        self, block: Block, places_ZT: Tensor, first_ZH: Tensor, counts_ZH1: Tensor, blocks_ZH1M: Tensor
    ) -> None:
        self._block = block
        self._seen = _fixed(places_ZT), _fixed(first_ZH), _fixed(counts_ZH1), _fixed(blocks_ZH1M, 1, 2)

    def attend(self, layer: int, queries_BHD: Tensor) -> Tensor:
        """[B, H, D] to [B, H * D], where keys and values of these tokens are stored."""
        B, H, D = queries_BHD.shape
        # One sequence of the keys of all rows and heads, as an input of the graph: see `LengthAttention`.
        keys, values = (_fixed(each.view(1, 1, -1, D), 0, 1, 3) for each in self._block.kv[layer])
        queries = _fixed(queries_BHD.view(-1, SEGMENT_TOKENS, H, D).transpose(1, 2))
        out: Tensor = _fast(attend_segments)(queries, keys, values, *self._seen)
        return out.transpose(1, 2).reshape(B, -1)


def begin_rows(
    ids_B: Tensor,
    places_B: Tensor,
    embedding_VE: Tensor,
    rotations_PC2: Tensor,
    num_places: int,
    norm_E: Tensor,
    eps: float,
    num_kv_heads: int,
    num_splits: int,
) -> tuple[Tensor, ...]:
    """Embed tokens and look their places up.

    Returns:
        Hidden states [B, E]; normalised for the first layer; [B, 2, D] float32, the factor of each element of a head
        and that of the other of its pair; the tensors of `split_blocks`, or without splits the mask of `places_mask`.
    """
    x_BE, *others = _embed(ids_B, places_B, embedding_VE, rotations_PC2, norm_E, eps)
    if num_splits:
        return x_BE, *others, *split_blocks(places_B, num_kv_heads, num_splits, num_places)
    return x_BE, *others, places_mask(places_B, num_places, x_BE.dtype)


def begin_segments(
    numbers_ZF: Tensor,
    embedding_VE: Tensor,
    rotations_PC2: Tensor,
    last_place: int,
    norm_E: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    num_places: int,
    num_listed: int,
) -> tuple[Tensor, ...]:
    """Embed the tokens of segments and look their places up, see `begin_rows`, `Segment.numbers` and `Layout`.

    Returns:
        The first three tensors of `begin_rows`; places and rows of the tokens, [B] int64; places once more, [Z, T]; the
        tensors of `segment_blocks`.
    """
    layout = Layout.of(numbers_ZF, last_place)
    places_B = layout.places_ZT.flatten()
    begun = _embed(layout.ids_B, places_B, embedding_VE, rotations_PC2, norm_E, eps)
    lists = segment_blocks(layout.slots_Z, layout.ends_Z, num_heads, num_kv_heads, num_places, num_listed)
    return *begun, places_B, layout.token_slots(), layout.places_ZT, *lists


def _embed(
    ids_B: Tensor, places_B: Tensor, embedding_VE: Tensor, rotations_PC2: Tensor, norm_E: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    cos, sin = rotations_PC2[places_B].unbind(-1)
    turns_B2D = torch.stack((torch.stack((cos, cos), -1).flatten(1), torch.stack((-sin, sin), -1).flatten(1)), 1)
    x_BE = embedding_VE[ids_B]
    return x_BE, _normed(x_BE, norm_E, eps).to(x_BE.dtype), turns_B2D


def add_norm(x_BE: Tensor, more_BE: Tensor, norm_E: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Add to the hidden states, and normalise the sum: both [B, E], the second in `dtype`."""
    x_BE = x_BE + more_BE
    return x_BE, _normed(x_BE, norm_E, eps).to(dtype)


def store_heads(
    qkv_BF: Tensor,
    qk_norm_ND: Tensor,
    turns_B2D: Tensor,
    kv_2SKCD: Tensor,
    places_B: Tensor,
    rows_B: Tensor | None,
    eps: float,
    has_norm: bool,
) -> Tensor:
    """Normalise and rotate queries and keys, store keys and values, and return the queries [B, H, D].

    Args:
        qkv_BF: [B, (H + 2 K) D].
        qk_norm_ND: [H + K, D], see `LayerWeights`.
        turns_B2D: see `begin_rows`.
        kv_2SKCD: of the layer; written.
        places_B: int64 place of each token in its row.
        rows_B: int64 row of each token; None: the first B, in their order.
        eps: of the norm.
        has_norm: whether the family normalises heads.
    """
    num_kv_heads, head_dim = kv_2SKCD.shape[2], kv_2SKCD.shape[4]
    num_heads = qk_norm_ND.shape[0] - num_kv_heads
    qkv = qkv_BF.view(len(qkv_BF), num_heads + 2 * num_kv_heads, head_dim)
    kv = qkv[:, num_heads:]
    # Keys and values as one: what is computed of the values is not used, and costs less than a second kernel.
    turned = _turned(kv, qk_norm_ND[num_heads] if has_norm else None, turns_B2D, eps)
    head = torch.arange(2 * num_kv_heads, device=kv.device)
    rows_B = torch.arange(len(kv), device=kv.device) if rows_B is None else rows_B
    kv_2SKCD[head // num_kv_heads, rows_B[:, None], head % num_kv_heads, places_B[:, None]] = torch.where(
        (head < num_kv_heads)[:, None], turned, kv
    )
    return _turned(qkv[:, :num_heads], qk_norm_ND[0] if has_norm else None, turns_B2D, eps)


def swiglu(gate_up_BF: Tensor) -> Tensor:
    """[B, 2 I], gate and then up, to [B, I]."""
    gate, up = gate_up_BF.chunk(2, -1)
    return F.silu(gate) * up


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()


def _turned(heads_BND: Tensor, norm_D: Tensor | None, turns_B2D: Tensor, eps: float) -> Tensor:
    wide = heads_BND.float() if norm_D is None else _normed(heads_BND, norm_D, eps)
    other = torch.unflatten(wide, -1, (-1, 2)).flip(-1).flatten(-2)
    turned: Tensor = wide * turns_B2D[:, :1] + other * turns_B2D[:, 1:]
    return turned.to(heads_BND.dtype)


def _add_norm(x: Tensor, more: Tensor, norm: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    normed: tuple[Tensor, Tensor] = _fast(add_norm)(_fixed(x), _fixed(more), _fixed(norm, 0), eps, dtype)
    return normed


def _gated(layer: LayerWeights, h: Tensor) -> Tensor:
    if len(layer.gate_up) == 2:  # packed
        gate, up = layer.gate_up
        return up.times(h, gate.silu(h))
    wide: Tensor = _fast(swiglu)(_fixed(layer.gate_up[0](h)))
    return wide


@cache
def _fast(function: Callable[..., Any]) -> Callable[..., Any]:
    # Sums over a few splits written out, as they are by default, are kernels of their own.
    return compiled(function, unroll_reductions_threshold=1)


def _fixed(tensor: Tensor, *dims: int) -> Tensor:
    """Have sizes be constants of a graph, all but the first where none is named: kernels for them are faster."""
    for dim in dims or range(1, tensor.dim()):  # one by one: of several it fails while another thread compiles
        torch._dynamo.mark_static(tensor, dim)
    return tensor
