"""Routes: the experts of a mixture that each token took, as the engine that sampled says, and a trainer may replay.

Shapes: T tokens, L decoder layers, K experts of a token. A layer without a router has numbers that are not read.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from offbeat_core._errors import ShapeError

RouteIds = npt.NDArray[np.int16]
"""[T, L, K] int16: numbers of experts; -1 for all experts of a token whose route is not known."""
_FASTEST: Final = 1
"""Level of zlib: numbers of experts are nearly random, so that more effort saves nothing."""


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Routes of a run of tokens of one sequence, compressed.

    Args:
        packed: [B] uint8, zlib of [T, L, K] numbers of experts plus 1, little-endian; 0 for a route that is not known.
        shape: T, L and K.
        highest: the highest number of an expert; -1 where no route is known.
        start: index in the sequence of the first of the tokens.
    """

    packed: npt.NDArray[np.uint8]
    shape: tuple[int, int, int]
    highest: int
    start: int = 0

    @classmethod
    def pack(cls, ids_TLK: npt.NDArray[np.integer], *, start: int = 0) -> Self:
        """Compress routes.

        Args:
            ids_TLK: as `RouteIds`, of any integer format.
            start: index in the sequence of the first of the tokens.

        Raises:
            ShapeError: they have another shape, or numbers that cannot be.
        """
        lowest, highest = (int(ids_TLK.min()), int(ids_TLK.max())) if ids_TLK.size else (-1, -1)
        limit = np.iinfo(np.int16).max
        if ids_TLK.ndim != 3 or lowest < -1 or highest >= limit:
            raise ShapeError(
                f"routes must be [tokens, layers, experts of a token], numbers from -1 to below {limit}: got "
                f"{ids_TLK.shape} from {lowest} to {highest}"
            )
        numbers = (ids_TLK.astype(np.int32) + 1).astype(_format(highest))
        packed = np.frombuffer(zlib.compress(numbers.tobytes(), _FASTEST), np.uint8)
        return cls(packed=packed, shape=ids_TLK.shape, highest=highest, start=start)

    @property
    def stop(self) -> int:
        """Index in the sequence after the last of the tokens."""
        return self.start + self.shape[0]

    def unpack(self) -> RouteIds:
        """Return [T, L, K] int16.

        Raises:
            ShapeError: the bytes are damaged, or not as many as the shape says.
        """
        number, inflater = _format(self.highest), zlib.decompressobj()
        size = int(np.prod(self.shape)) * number.itemsize
        try:  # no more than was promised, whatever the bytes stand for
            found = inflater.decompress(self.packed.tobytes(), size + 1)
        except zlib.error as error:
            raise ShapeError(f"routes of {self.shape} are damaged: {error}") from error
        if len(found) != size:
            raise ShapeError(f"routes of {self.shape} are damaged: they have {len(found)} bytes instead of {size}")
        return (np.frombuffer(found, number).reshape(self.shape).astype(np.int32) - 1).astype(np.int16)

    def since(self, start: int) -> Self:
        """Return those of the tokens from `start` on, an index in the sequence."""
        if start <= self.start:
            return self
        return type(self).pack(self.unpack()[start - self.start :], start=min(start, self.stop))


def join_routes(parts: Sequence[Routes], num_tokens: int, shape: tuple[int, int]) -> RouteIds:
    """Return [T, L, K] int16 of the first `num_tokens` tokens: of each, what the first part says that knows it.

    Args:
        parts: of one sequence or of sequences that begin with these tokens.
        num_tokens: T.
        shape: L and K of all parts.
    """
    found = np.full((num_tokens, *shape), -1, np.int16)
    for part in parts:
        here = found[part.start : part.stop]
        if (unknown := here[:, 0, 0] < 0).any():
            here[unknown] = part.unpack()[: len(here)][unknown]
    return found


def _format(highest: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype("u1" if highest < np.iinfo(np.uint8).max else "<u2")
