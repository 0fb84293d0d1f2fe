"""Decoding without a look at what was drawn: a step reads and writes what lies on the device, at the same addresses.

Each sample has a row of `StaticCache`. Its last token, that token's place, how many it has drawn, its seed and its
sampling parameters lie in columns of two tensors beside, in the order of the rows. A step takes the token to the next,
counts on, and leaves it in place of the last; so the next step may begin before the token has been read. The host
reads it one step late, and does not use what a sample has drawn after its end.

A step's shapes are few: so many rows, so many places of each, with a cut or without. Where the device records work (see
`offbeat_device.Device.work_graphs`), the second step of a shape is recorded, and is one call from then on. So is a pass
of prompts, of which there are few shapes too (see `prefill`). Weights are written in place, so recordings stay valid;
other weights or another block begin anew.

Shapes: B rows of a step, H query heads, K kv heads, G = H / K, D head_dim, C places, S rows of the cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from offbeat_core import SamplingParams
from offbeat_device import Device, WorkGraphs, copy_to_device
from offbeat_rollout_torch._attention import Chunk
from offbeat_rollout_torch._cache import SMALLEST_CAPACITY, Block, flat_positions
from offbeat_rollout_torch._decoder import DecoderWeights, decode_hidden, decode_logits
from offbeat_rollout_torch._families import Architecture
from offbeat_rollout_torch._sampling import RowParams, device_uniforms, draw_rows, row_numbers, seed_states
from offbeat_rollout_torch._scheduler import Sample
from offbeat_rollout_torch._static_rows.cache import StaticCache
from offbeat_rollout_torch._static_rows.prefill import (
    MASKED_SEGMENTS,
    PASS_SEGMENTS,
    SEGMENT_NUMBERS,
    SEGMENT_TOKENS,
    Layout,
    PassShape,
    SegmentAttention,
    cut_segments,
    passes,
)

WHOLE_NUMBERS: Final = 4
"""Integers of a row: its last token, the place of that, how many it has drawn, and `seed_states` of its seed."""
PARAM_NUMBERS: Final = 6
"""Numbers of a row: those of `RowParams`."""
DOUBLE_UP_TO_ROWS: Final = 16
"""The numbers of rows that steps have: powers of two up to this, and then multiples of it."""


class StepShape(NamedTuple):
    """Shape by which recorded steps differ.

    Args:
        num_rows: computed, those of samples and some more.
        num_places: of each row that are attended to at most.
        is_cut: the draw sorts the vocabulary.
    """

    num_rows: int
    num_places: int
    is_cut: bool


@dataclass(frozen=True, eq=False)
class StepInFlight:
    """A step that the host has not read.

    Args:
        samples: in the order of their rows; None for one that drew nothing, as its prompt is being computed.
        ids: waits for the tokens, [B] int64.
        logprobs: waits for their log-probabilities, [B] float32.
    """

    samples: Sequence[Sample | None]
    ids: Callable[[], Tensor]
    logprobs: Callable[[], Tensor]


class StepInputs(NamedTuple):
    """Inputs of steps beside the rows' columns.

    Args:
        weights: frozen.
        rotations_PC2: [positions, head_dim / 2, 2] float32, cosine and sine.
        block: keys and values.
    """

    weights: DecoderWeights
    rotations_PC2: Tensor
    block: Block

    def is_same(self, other: "StepInputs | None") -> bool:
        return other is not None and all(one is another for one, another in zip(self, other, strict=True))


class StaticDecoder:
    """Queues decoding steps, and passes of prompts, on the device.

    Args:
        cache: of the samples.
        device: where it lies.
        num_positions: of a sequence at most.
        step: what it queues.
        records: use the device's recorded work, if it has any.
    """

    def __init__(
        self, cache: StaticCache, device: Device, num_positions: int, step: "PlainStep", *, records: bool
    ) -> None:
        self.cache, self._device, self._step, self._records = cache, device, step, records
        self._last_place, target = num_positions - 1, device.torch_device
        self._whole_numbers = torch.zeros(WHOLE_NUMBERS, cache.num_rows, dtype=torch.int64, device=target)
        self._params = torch.ones(PARAM_NUMBERS, cache.num_rows, device=target)
        self._logprobs = torch.zeros(cache.num_rows, device=target)
        numbers_of_segment = SEGMENT_NUMBERS + SEGMENT_TOKENS
        self._segments = torch.zeros(PASS_SEGMENTS[-1], numbers_of_segment, dtype=torch.int64, device=target)
        self._inputs: StepInputs | None = None
        self.forget()

    def forget(self) -> None:
        """Let go of recorded steps, their memory, and what they read."""
        self._inputs = None
        self._seen = set[StepShape | PassShape]()
        self._recorded: dict[StepShape | PassShape, Callable[[], None]] = {}
        self._graphs: WorkGraphs | None = self._device.work_graphs() if self._records else None

    @property
    def records(self) -> bool:
        """Return whether the device records work, and may."""
        return self._graphs is not None

    def prefill(self, weights: DecoderWeights, rotations_PC2: Tensor, chosen: Sequence[tuple[Sample, Chunk]]) -> None:
        """Queue passes that store keys and values of chunks of prompts, and wait for nothing.

        Args:
            weights: frozen.
            rotations_PC2: [positions, head_dim / 2, 2] float32, cosine and sine.
            chosen: chunks of samples in this cache's rows, which have memory; without images or adapters.
        """
        inputs = self._take(weights, rotations_PC2)
        by_length, capacity = self._step.prefills_by_length, inputs.block.capacity
        for segments in passes(cut_segments(chosen), PASS_SEGMENTS[-1] if by_length else MASKED_SEGMENTS):
            numbers = [segment.numbers() for segment in segments]
            self._segments[: len(segments)].copy_(self._send(numbers, torch.int64))
            longest = max(segment.end for segment in segments)
            shape = PassShape(len(segments), capacity if by_length else min(_places(longest), capacity))
            self._run(shape, partial(self._pass, shape, inputs))

    def start(
        self,
        weights: DecoderWeights,
        rotations_PC2: Tensor,
        samples: Sequence[Sample | None],
        before: Sequence[Sample | None],
    ) -> StepInFlight:
        """Queue one step.

        Args:
            weights: frozen.
            rotations_PC2: [positions, head_dim / 2, 2] float32, cosine and sine.
            samples: in the order of their rows, each with one token to go through the model; None for one that waits.
                Not all of them wait.
            before: those of the step that is in flight; empty: none is, and the host knows every sample's last token.
        """
        inputs = self._take(weights, rotations_PC2)
        drawing = [(row, sample) for row, sample in enumerate(samples) if sample is not None]
        num_rows = min(_bucket(drawing[-1][0] + 1), inputs.block.num_rows)
        samples = samples[:num_rows]  # with those that wait behind the last sample: they write, too
        self._arrange(samples, before)
        longest = max(sample.num_cached for _, sample in drawing) + 1
        is_cut = any(sample.params.is_cut and sample.params.temperature > 0 for _, sample in drawing)
        attended = inputs.block.capacity if self._step.by_length else min(_places(longest), inputs.block.capacity)
        shape = StepShape(num_rows, attended, is_cut)
        self._run(shape, partial(self._work, shape, inputs))
        ids, logprobs = self._whole_numbers[0, : len(samples)], self._logprobs[: len(samples)]
        return StepInFlight(samples, self._device.copy_to_host(ids), self._device.copy_to_host(logprobs))

    def _take(self, weights: DecoderWeights, rotations_PC2: Tensor) -> StepInputs:
        """Return what steps read, and forget what was recorded with other weights or another block."""
        inputs = StepInputs(weights, rotations_PC2, self.cache.block)
        if not inputs.is_same(self._inputs):
            self.forget()
            self._inputs = inputs
        return inputs

    def _arrange(self, samples: Sequence[Sample | None], before: Sequence[Sample | None]) -> None:
        """Have the columns of these samples in their order: those in flight from the device, others from the host.

        A row that waits computes idly at the last place, which no sample reads before it has written it.
        """
        columns = {id(sample): column for column, sample in enumerate(before) if sample is not None}
        waited = {column for column, sample in enumerate(before) if sample is None}
        sources = [
            columns.get(id(sample)) if sample is not None or column not in waited else column
            for column, sample in enumerate(samples)
        ]
        if sources == list(range(len(samples))):
            return
        if before:
            kept = self._send([source or 0 for source in sources], torch.int64)
            for numbers in (self._whole_numbers, self._params):
                numbers[:, : len(samples)] = numbers.index_select(1, kept)
        if new := [column for column, source in enumerate(sources) if source is None]:
            entering = [samples[column] for column in new]
            states = seed_states([one.seed if one else 0 for one in entering])
            whole = [
                [one.tokens[-1], one.num_cached, one.num_drawn, state] if one else [0, self._last_place, 0, state]
                for one, state in zip(entering, states, strict=True)
            ]
            params = [row_numbers(one.params if one else SamplingParams(), self._vocabulary) for one in entering]
            at = self._send(new, torch.int64)
            self._whole_numbers.index_copy_(1, at, self._send(whole, torch.int64).t())
            self._params.index_copy_(1, at, self._send(params, torch.float32).t())

    @property
    def _vocabulary(self) -> int:
        assert self._inputs is not None
        return self._inputs.weights.architecture.vocab_size

    def _send(self, numbers: list[int] | list[list[int]] | list[list[float]], dtype: torch.dtype) -> Tensor:
        return copy_to_device(torch.tensor(numbers, dtype=dtype), self._device.torch_device)

    def _run(self, shape: StepShape | PassShape, work: Callable[[], None]) -> None:
        if self._graphs is not None and shape in self._seen and shape not in self._recorded:
            self._recorded[shape] = self._graphs.record(work)
        self._seen.add(shape)
        self._recorded.get(shape, work)()

    def _work(self, shape: StepShape, inputs: StepInputs) -> None:
        """Take the last token of each row through the model and draw the next; rows without a sample compute idly."""
        columns, params = self._whole_numbers[:, : shape.num_rows], self._params[:, : shape.num_rows]
        logits = self._step.logits(inputs.weights, columns, inputs.rotations_PC2, inputs.block, shape.num_places)
        after, logprobs = self._step.draw(logits, params, columns, self._last_place, is_cut=shape.is_cut)
        columns.copy_(after)
        self._logprobs[: shape.num_rows].copy_(logprobs)

    def _pass(self, shape: PassShape, inputs: StepInputs) -> None:
        """Take the tokens of segments through the model, of which their keys and values remain."""
        numbers, (weights, rotations_PC2, block) = self._segments[: shape.num_segments], inputs
        self._step.prefill(weights, numbers, rotations_PC2, block, shape.num_places, self._last_place)


class PlainStep:
    """The work of a step, by torch's operators one by one.

    Attributes:
        by_length: its attention reads each row up to its own place, so that steps of any lengths have one shape.
        prefills_by_length: likewise for passes of prompts.
    """

    by_length = False
    prefills_by_length = False

    def logits(
        self, weights: DecoderWeights, numbers_4B: Tensor, rotations_PC2: Tensor, block: Block, num_places: int
    ) -> Tensor:
        """Store keys and values of the rows' last tokens, and return logits of the next, [B, vocabulary] float32.

        Args:
            weights: frozen.
            numbers_4B: int64 columns of the rows, see `WHOLE_NUMBERS`.
            rotations_PC2: [positions, head_dim / 2, 2] float32, cosine and sine.
            block: of the rows.
            num_places: attended to at most; none of a row with a sample lies behind.
        """
        mask = places_mask(numbers_4B[1], num_places, weights.dtype)
        attention = StaticAttention(block, numbers_4B[1], num_places, weights.architecture, mask)
        return decode_logits(weights, decode_hidden(weights, numbers_4B[0], rotations_PC2, attention))

    def draw(
        self, logits_BV: Tensor, params_6B: Tensor, numbers_4B: Tensor, last_place: int, *, is_cut: bool
    ) -> tuple[Tensor, Tensor]:
        """Draw the next tokens.

        Args:
            logits_BV: float32.
            params_6B: float32 columns of the rows, see `PARAM_NUMBERS`.
            numbers_4B: int64 columns of the rows, see `WHOLE_NUMBERS`.
            last_place: of a sequence.
            is_cut: some row's distribution is.

        Returns:
            The columns after the step, [4, B] int64, and the tokens' log-probabilities, [B] float32.
        """
        return draw_next(logits_BV, params_6B, numbers_4B, last_place, is_cut=is_cut)

    def prefill(
        self,
        weights: DecoderWeights,
        numbers_ZF: Tensor,
        rotations_PC2: Tensor,
        block: Block,
        num_places: int,
        last_place: int,
    ) -> None:
        """Store keys and values of the tokens of segments.

        Args:
            weights: frozen.
            numbers_ZF: [segments, 3 + T] int64, see `Segment.numbers`.
            rotations_PC2: [positions, head_dim / 2, 2] float32, cosine and sine.
            block: of the rows.
            num_places: attended to at most; no token of a segment lies behind.
            last_place: of a sequence, where the tokens that fill segments up are stored.
        """
        layout = Layout.of(numbers_ZF, last_place)
        attention = SegmentAttention(block, layout, num_places, weights.architecture, weights.dtype)
        decode_hidden(weights, layout.ids_B, rotations_PC2, attention)


def draw_next(
    logits_BV: Tensor, params_6B: Tensor, numbers_4B: Tensor, last_place: int, *, is_cut: bool
) -> tuple[Tensor, Tensor]:
    """See `PlainStep.draw`."""
    _, places, counts, states = numbers_4B.unbind()
    drawn, logprobs = draw_rows(logits_BV, RowParams.of(params_6B), device_uniforms(states, counts), is_cut=is_cut)
    return torch.stack((drawn, (places + 1).clamp(max=last_place), counts + 1, states)), logprobs


def _bucket(num_samples: int) -> int:
    if num_samples <= DOUBLE_UP_TO_ROWS:
        return 1 << (num_samples - 1).bit_length()
    return -(-num_samples // DOUBLE_UP_TO_ROWS) * DOUBLE_UP_TO_ROWS


def _places(length: int) -> int:
    return max(SMALLEST_CAPACITY, 1 << (length - 1).bit_length())


class StaticAttention:
    """One new token for each of the first B rows of a block, see `Attention`.

    Args:
        block: of the rows.
        places_B: [B] int64 place of each new token.
        num_places: attended to; none of a row with a sample lies behind.
        architecture: of the model.
        mask_B11C: see `places_mask`.
    """

    state_rows: Final = ()  # static rows are refused for the gated delta rule

    def __init__(
        self, block: Block, places_B: Tensor, num_places: int, architecture: Architecture, mask_B11C: Tensor
    ) -> None:
        self._block, self._num_places, self._mask = block, num_places, mask_B11C
        self._num_heads, self._num_kv_heads = architecture.num_heads, architecture.num_kv_heads
        self.positions_N = places_B

    @cached_property
    def _store(self) -> Tensor:
        slots = torch.arange(len(self.positions_N), device=self.positions_N.device)
        return flat_positions(self._block, slots, self.positions_N, self._num_kv_heads)

    def __call__(self, layer: int, qkv_NhD: Tensor) -> Tensor:
        H, D = self._num_heads, qkv_NhD.shape[-1]
        self._block.flat[layer].index_copy_(0, self._store, qkv_NhD[:, H:].reshape(-1, D))
        return self.attend(layer, qkv_NhD[:, :H])

    def attend(self, layer: int, queries_BHD: Tensor) -> Tensor:
        """[B, H, D] to [B, H * D], where keys and values of these tokens are stored."""
        B, H, K, D = len(queries_BHD), self._num_heads, self._num_kv_heads, queries_BHD.shape[-1]
        # The G query heads of a kv head are rows of its attention, which no kernel with a mask would otherwise group.
        queries = queries_BHD.reshape(B, K, H // K, D)
        keys, values = self._block.kv[layer, :, :B, :, : self._num_places]
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._mask).reshape(B, H * D)


def places_mask(places_B: Tensor, num_places: int, dtype: torch.dtype) -> Tensor:
    """[B, 1, 1, C] added to scores: 0 up to the place of each row, and -inf behind it."""
    hidden_BC = torch.arange(num_places, device=places_B.device) > places_B[:, None]
    mask = torch.zeros(hidden_BC.shape, dtype=dtype, device=places_B.device).masked_fill_(hidden_BC, -torch.inf)
    return mask[:, None, None]
