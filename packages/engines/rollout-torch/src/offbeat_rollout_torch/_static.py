"""Decoding without a look at what was drawn: a step reads and writes what lies on the device, at the same addresses.

Each sample has a row of `StaticCache`. Its last token, that token's place, how many it has drawn, its seed and its
sampling parameters lie in columns of two tensors beside, in the order of the rows. A step takes the token to the next,
counts on, and leaves it in place of the last; so the next step may begin before the token has been read. The host
reads it one step late, and does not use what a sample has drawn after its end.

A step's shapes are few: so many rows, so many places of each, with a cut or without. Where the device records work (see
`offbeat_device.Device.work_graphs`), the second step of a shape is recorded, and is one call from then on. Weights are
written in place, so recordings stay valid; other weights or another block begin anew.

Shapes: B rows of a step, H query heads, K kv heads, G = H / K, D head_dim, C places, S rows of the cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from offbeat_device import Device, WorkGraphs
from offbeat_rollout_torch._cache import SMALLEST_CAPACITY, Block, StaticCache, flat_positions
from offbeat_rollout_torch._decoder import DecoderWeights, decode_hidden, decode_logits
from offbeat_rollout_torch._families import Architecture
from offbeat_rollout_torch._sampling import RowParams, device_uniforms, draw_rows, row_numbers, seed_states
from offbeat_rollout_torch._scheduler import Sample

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
        num_places: of each row that are attended to.
        is_cut: the draw sorts the vocabulary.
    """

    num_rows: int
    num_places: int
    is_cut: bool


@dataclass(frozen=True, eq=False)
class StepInFlight:
    """A step that the host has not read.

    Args:
        samples: in the order of their rows.
        ids: waits for the tokens, [B] int64.
        logprobs: waits for their log-probabilities, [B] float32.
    """

    samples: Sequence[Sample]
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
    """Queues decoding steps on the device.

    Args:
        cache: of the samples.
        device: where it lies.
        num_positions: of a sequence at most.
        records: use the device's recorded work, if it has any.
    """

    def __init__(self, cache: StaticCache, device: Device, num_positions: int, *, records: bool) -> None:
        self.cache, self._device, self._records = cache, device, records
        self._last_place, target = num_positions - 1, device.torch_device
        self._whole_numbers = torch.zeros(WHOLE_NUMBERS, cache.num_rows, dtype=torch.int64, device=target)
        self._params = torch.ones(PARAM_NUMBERS, cache.num_rows, device=target)
        self._logprobs = torch.zeros(cache.num_rows, device=target)
        self._inputs: StepInputs | None = None
        self.forget()

    def forget(self) -> None:
        """Let go of recorded steps, their memory, and what they read."""
        self._inputs = None
        self._seen = set[StepShape]()
        self._recorded: dict[StepShape, Callable[[], None]] = {}
        self._graphs: WorkGraphs | None = self._device.work_graphs() if self._records else None

    def start(
        self, weights: DecoderWeights, rotations_PC2: Tensor, samples: Sequence[Sample], before: Sequence[Sample]
    ) -> StepInFlight:
        """Queue one step.

        Args:
            weights: frozen.
            rotations_PC2: [positions, head_dim / 2, 2] float32, cosine and sine.
            samples: in the order of their rows, each with one token to go through the model.
            before: those of the step that is in flight; empty: none is, and the host knows every sample's last token.
        """
        inputs = StepInputs(weights, rotations_PC2, self.cache.block)
        if not inputs.is_same(self._inputs):
            self.forget()
            self._inputs = inputs
        self._arrange(samples, before)
        longest = max(sample.num_cached for sample in samples) + 1
        is_cut = any(sample.params.is_cut and sample.params.temperature > 0 for sample in samples)
        num_rows, num_places = inputs.block.num_rows, inputs.block.capacity
        shape = StepShape(min(_bucket(len(samples)), num_rows), min(_places(longest), num_places), is_cut)
        self._run(shape, inputs)
        ids, logprobs = self._whole_numbers[0, : len(samples)], self._logprobs[: len(samples)]
        return StepInFlight(samples, self._device.copy_to_host(ids), self._device.copy_to_host(logprobs))

    def _arrange(self, samples: Sequence[Sample], before: Sequence[Sample]) -> None:
        """Have the columns of these samples in their order: those in flight from the device, others from the host."""
        columns = {id(sample): column for column, sample in enumerate(before)}
        sources = [columns.get(id(sample)) for sample in samples]
        if sources == list(range(len(samples))):
            return
        if before:
            kept = self._send([source or 0 for source in sources], torch.int64)
            for numbers in (self._whole_numbers, self._params):
                numbers[:, : len(samples)] = numbers.index_select(1, kept)
        if new := [column for column, source in enumerate(sources) if source is None]:
            entering = [samples[column] for column in new]
            states = seed_states([one.seed for one in entering])
            whole = [
                [one.tokens[-1], one.num_cached, one.num_drawn, state]
                for one, state in zip(entering, states, strict=True)
            ]
            params = [row_numbers(one.params, self._vocabulary) for one in entering]
            at = self._send(new, torch.int64)
            self._whole_numbers.index_copy_(1, at, self._send(whole, torch.int64).t())
            self._params.index_copy_(1, at, self._send(params, torch.float32).t())

    @property
    def _vocabulary(self) -> int:
        assert self._inputs is not None
        return self._inputs.weights.architecture.vocab_size

    def _send(self, numbers: list[int] | list[list[int]] | list[list[float]], dtype: torch.dtype) -> Tensor:
        return torch.tensor(numbers, dtype=dtype).to(self._device.torch_device, non_blocking=True)

    def _run(self, shape: StepShape, inputs: StepInputs) -> None:
        if self._graphs is not None and shape in self._seen and shape not in self._recorded:
            self._recorded[shape] = self._graphs.record(lambda: self._step(shape, inputs))
        self._seen.add(shape)
        if recorded := self._recorded.get(shape):
            recorded()
        else:
            self._step(shape, inputs)

    def _step(self, shape: StepShape, inputs: StepInputs) -> None:
        """Take the last token of each row through the model and draw the next; rows without a sample compute idly."""
        weights = inputs.weights
        ids, places, counts, states = self._whole_numbers[:, : shape.num_rows].unbind()
        attention = StaticAttention(inputs.block, places, shape.num_places, weights.architecture, weights.final_norm)
        logits = decode_logits(weights, decode_hidden(weights, ids, inputs.rotations_PC2, attention))
        params = RowParams.of(self._params[:, : shape.num_rows])
        drawn, logprobs = draw_rows(logits, params, device_uniforms(states, counts), is_cut=shape.is_cut)
        ids.copy_(drawn)
        self._logprobs[: shape.num_rows].copy_(logprobs)
        places.add_(1).clamp_(max=self._last_place)
        counts.add_(1)


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
        like: of the keys and values.
    """

    def __init__(
        self, block: Block, places_B: Tensor, num_places: int, architecture: Architecture, like: Tensor
    ) -> None:
        self._block, self._num_places = block, num_places
        self._num_heads, self._num_kv_heads = architecture.num_heads, architecture.num_kv_heads
        self.positions_N = places_B
        slots = torch.arange(len(places_B), device=like.device)
        self._store = flat_positions(block, slots, places_B, self._num_kv_heads)
        hidden_BC = torch.arange(num_places, device=like.device) > places_B[:, None]
        mask = torch.zeros(hidden_BC.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden_BC, -torch.inf)
        self._mask = mask[:, None, None]

    def __call__(self, layer: int, qkv_NhD: Tensor) -> Tensor:
        B, H, K, D = len(qkv_NhD), self._num_heads, self._num_kv_heads, qkv_NhD.shape[-1]
        self._block.flat[layer].index_copy_(0, self._store, qkv_NhD[:, H:].reshape(-1, D))
        # The G query heads of a kv head are rows of its attention, which no kernel with a mask would otherwise group.
        queries = qkv_NhD[:, :H].reshape(B, K, H // K, D)
        keys, values = self._block.kv[layer, :, :B, :, : self._num_places]
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._mask).reshape(B, H * D)
