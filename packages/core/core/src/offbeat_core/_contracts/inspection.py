"""Values that a model computes on the way to its log-probabilities, by the same names in every engine.

They are for comparing two implementations of one model, a layer at a time: what a whole model computes is too large to
keep. T tokens of one sequence.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from offbeat_core._contracts.requests import Floats, Ids
from offbeat_core._contracts.trajectory import TrainSequence

Fingerprint = npt.NDArray[np.float64]
Inspection = Mapping[str, Floats]
"""Values by point, each [T, width] float32, tokens in order; in the order in which they are computed. An engine may
leave out the last token, which predicts none of the sequence."""

TOKEN_IDS: Final = "token ids"
POSITIONS: Final = "positions"
EMBEDDING: Final = "embedding"
FINAL_NORM: Final = "final norm"
LOGPROB: Final = "log-probability"
"""Points that lie between layers. Token ids are [T, 1], positions too, or [T, axes] where they have several."""

LAYER_POINTS: Final = (
    "attention input",
    "query projection",
    "key projection",
    "value projection",
    "query",
    "key",
    "attention",
    "after attention",
    "mlp input",
    "experts",
    "activation",
)
"""Points within a layer, in order. Inputs are what the norms before attention and MLP give; query and key are
normalised and turned by position, heads side by side, as the model folder orders a head; `attention` is what the last
product of the mixer takes, `after attention` the residual stream between attention and MLP; `experts` are those that a
token took, in ascending order; `activation` is what the last product of a dense MLP takes. An engine leaves out what it
does not have, or has only in part."""


def layer_point(layer: int) -> str:
    """Return the name of what a layer gives to the next one."""
    return f"layer {layer}"


@runtime_checkable
class InspectedTrainEngine(Protocol):
    """A training engine that says what it computes; see `InspectedEngine`."""

    def inspect(self, sequence: TrainSequence, layer: int | None = None) -> Inspection:
        """Run one sequence; every rank calls it, and the first one's answer counts. Compiled layers run uncompiled."""


@runtime_checkable
class InspectedEngine(Protocol):
    """A rollout engine that says what it computes. It needs no declaration: a caller looks for the methods."""

    async def inspect(
        self, ids: Ids, layer: int | None = None, *, adapter: str = "", temperature: float = 1.0
    ) -> Inspection:
        """Run one sequence alone, in a cache of its own.

        Args:
            ids: [T] int32.
            layer: whose `LAYER_POINTS` are wanted; None: what lies between layers, TOKEN_IDS to FINAL_NORM
                with `layer_point` of each. LOGPROB comes with both: [T, 1] nats of each token, 0 for the first.
            adapter: name of a `LoraAdapter` that the engine has been given; "" for none.
            temperature: of the log-probabilities.

        Raises:
            DataError: the sequence is longer than the engine takes.
        """

    async def fingerprints(self, names: Sequence[str]) -> Mapping[str, Fingerprint]:
        """Return the `fingerprint` of tensors that are served, by Hugging Face name, without those it does not hold."""


_NUM_SAMPLED: Final = 64
_SUMMED_AT_ONCE: Final = 1 << 20


def fingerprint(values: npt.ArrayLike) -> Fingerprint:
    """[67] float64: sum, sum of squares and checksum of a tensor, and elements at even distances (the last repeated).

    The checksum depends on the order of the elements, so that a transposed matrix has another.

    Args:
        values: of any shape, rounded to the format in which the two sides that are compared hold it.
    """
    flat = np.asarray(values, np.float32).reshape(-1)
    places = np.linspace(0, max(flat.size - 1, 0), _NUM_SAMPLED).astype(np.int64)
    sampled = flat[places] if flat.size else np.zeros(_NUM_SAMPLED, np.float32)
    return np.asarray([flat.sum(dtype=np.float64), np.square(flat, dtype=np.float64).sum(), _checksum(flat), *sampled])


def _checksum(flat: npt.NDArray[np.float32]) -> int:
    """Return a sum of the elements' bits, each times an odd number that its place gives, modulo 2**32."""
    total = 0
    for start in range(0, flat.size, _SUMMED_AT_ONCE):
        bits = (flat[start : start + _SUMMED_AT_ONCE] + np.float32(0)).view(np.uint32)  # without the sign of -0
        part = (bits * (2 * np.arange(bits.size, dtype=np.uint32) + 1)).sum(dtype=np.uint32)
        total = (1_000_003 * total + int(part)) % 2**32
    return total
