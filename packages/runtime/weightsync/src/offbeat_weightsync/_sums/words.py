"""A checksum that is computed where the bytes lie, for weights that need not leave their device.

The bytes of a bucket are read as 64-bit words; each is multiplied with an odd number that its place gives, and all are
added up, modulo 2^64. An odd factor can be undone, so a change within one word always shows; others go unseen by
chance, at 2^-64. The sum can be taken piece by piece, in any order, and only its result is fetched: once for each
bucket.

Source: the numbers are those of SplitMix64 (https://doi.org/10.1145/2714064.2660195, figure 14), made odd.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

WORD_BYTES: Final = 8
CHUNK_WORDS: Final = 1 << 20
"""Taken at a time: a few times so many words are needed beside the weights."""

MODULUS: Final = 1 << 64


class WordSum:
    """The checksum of a bucket, piece by piece."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, first: int, part: Tensor) -> None:
        """Take bytes in.

        Args:
            first: where they begin in the bucket, a multiple of 8.
            part: [bytes] uint8 on any device; a last word that is not whole counts as if zeros followed.
        """
        for start in range(0, len(part), CHUNK_WORDS * WORD_BYTES):
            words = _words(part[start : start + CHUNK_WORDS * WORD_BYTES])
            place = (first + start) // WORD_BYTES
            found = (words * _factors(torch.arange(place, place + len(words), device=part.device))).sum()
            self._sum = found if self._sum is None else self._sum + found

    def hexdigest(self) -> str:
        """16 hex digits; waits for the device."""
        value = 0 if self._sum is None else int(self._sum)
        return f"{value % MODULUS:016x}"


def _words(part: Tensor) -> Tensor:
    """[words] int64: a view, where that can be."""
    if missing := -len(part) % WORD_BYTES:
        part = torch.cat([part, part.new_zeros(missing)])
    elif part.storage_offset() % WORD_BYTES:
        part = part.clone()
    return part.view(torch.int64)


def _factors(places: Tensor) -> Tensor:
    """[words] int64, odd, for words at these places. Integers of torch wrap around; shifts keep the sign."""
    z = (places + 1) * -0x61C8864680B583EB
    z = (z ^ _shifted(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shifted(z, 27)) * -0x6B2FB644ECCEEE15
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shifted to the right, zeros coming in."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


class BoxWords:
    """The words of a box out of a tensor, such as some of its columns.

    Where the box begins and ends at whole words in every row it is read as words. Else it is read as elements, each of
    which is a part of a word.

    Args:
        whole: shape of the tensor.
        first: index of the box's first element in it.
        held: the box, with as many dims, on any device.
    """

    def __init__(self, whole: Sequence[int], first: Sequence[int], held: Tensor) -> None:
        sizes, starts, wholes = _merged([*held.shape], [*first], [*whole])
        flat, self._unit_bytes = held.detach().reshape(-1).contiguous(), held.element_size()
        per_word = WORD_BYTES // self._unit_bytes
        ends = (wholes[-1] if len(wholes) > 1 else 0, starts[-1], sizes[-1])
        if all(end % per_word == 0 for end in ends):
            sizes[-1], starts[-1], wholes[-1] = sizes[-1] // per_word, starts[-1] // per_word, wholes[-1] // per_word
            self._values, self._unit_bytes = _words(flat.view(torch.uint8)), WORD_BYTES
        else:
            self._values = flat.view(_INTEGERS[self._unit_bytes])
        self._sizes, self._starts, self._wholes = sizes, starts, wholes

    def sum(self, first: int, num_bytes: int, bucket_offset: int) -> Tensor:
        """Sum what lies in a run of bytes of the tensor, modulo 2^64.

        Args:
            first: byte of the tensor with which the run begins, a multiple of 8.
            num_bytes: of the run.
            bucket_offset: where the run begins in its bucket, a multiple of 8.

        Returns:
            [] int64 on the device of the box; the sums of parts that cover a bucket add up to its `WordSum`.
        """
        begin, end = self._num_before(first), self._num_before(first + num_bytes)
        total = self._values.new_zeros((), dtype=torch.int64)
        for start in range(begin, end, CHUNK_WORDS):
            values = self._values[start : min(start + CHUNK_WORDS, end)].long()
            places = self._places(start, len(values)) * self._unit_bytes + (bucket_offset - first)
            if self._unit_bytes < WORD_BYTES:
                values = (values & ((1 << 8 * self._unit_bytes) - 1)) << 8 * (places % WORD_BYTES)
            total += (values * _factors(places // WORD_BYTES)).sum()
        return total

    def _num_before(self, byte: int) -> int:
        """Return how many units of the box come before a byte of the tensor."""
        place, count = -(-byte // self._unit_bytes), 0
        for dim, (size, start) in enumerate(zip(self._sizes, self._starts, strict=True)):
            index, place = divmod(place, math.prod(self._wholes[dim + 1 :]))
            below = math.prod(self._sizes[dim + 1 :])
            if not start <= index < start + size:
                return count + size * below * (index >= start)
            count += (index - start) * below
        return count

    def _places(self, first: int, count: int) -> Tensor:
        """[count] int64: where units of the box lie in the tensor."""
        rest = torch.arange(first, first + count, device=self._values.device)
        places, step = torch.zeros_like(rest), 1
        for size, start, whole in reversed([*zip(self._sizes, self._starts, self._wholes, strict=True)]):
            places += (rest % size + start) * step
            rest, step = rest // size, step * whole
        return places


_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _merged(sizes: list[int], starts: list[int], wholes: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Return the same box with fewer dims: the last ones that it spans are one with the dim before them."""
    if not wholes:
        return [1], [0], [1]
    while len(wholes) > 1 and sizes[-1] == wholes[-1]:
        whole = wholes.pop()
        sizes.pop(), starts.pop()
        for each in (sizes, starts, wholes):
            each[-1] *= whole
    return sizes, starts, wholes
