"""A checksum that is computed where the bytes lie, for weights that need not leave their device.

The bytes of a bucket are read as 64-bit words; each is multiplied with an odd number that its place gives, and all are
added up, modulo 2^64. An odd factor can be undone, so a change within one word always shows; others go unseen by
chance, at 2^-64. The sum can be taken piece by piece, in any order, and only its result is fetched: once for each
bucket.

Source: the numbers are those of SplitMix64 (https://doi.org/10.1145/2714064.2660195, figure 14), made odd.
"""

from typing import Final

import torch
from torch import Tensor

WORD_BYTES: Final = 8
CHUNK_WORDS: Final = 1 << 20
"""Taken at a time: a few times so many words are needed beside the weights."""


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
            found = (words * _factors(place, len(words), part.device)).sum()
            self._sum = found if self._sum is None else self._sum + found

    def hexdigest(self) -> str:
        """16 hex digits; waits for the device."""
        value = 0 if self._sum is None else int(self._sum)
        return f"{value & (2**64 - 1):016x}"


def _words(part: Tensor) -> Tensor:
    """[words] int64: a view, where that can be."""
    if missing := -len(part) % WORD_BYTES:
        part = torch.cat([part, part.new_zeros(missing)])
    elif part.storage_offset() % WORD_BYTES:
        part = part.clone()
    return part.view(torch.int64)


def _factors(first: int, count: int, device: torch.device) -> Tensor:
    """[count] int64, odd, for words from this place on. Integers of torch wrap around; shifts keep the sign."""
    z = torch.arange(first + 1, first + count + 1, device=device) * -0x61C8864680B583EB
    z = (z ^ _shifted(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shifted(z, 27)) * -0x6B2FB644ECCEEE15
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shifted to the right, zeros coming in."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
