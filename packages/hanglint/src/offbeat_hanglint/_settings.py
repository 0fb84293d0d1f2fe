"""What a caller may choose."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """How an analysis is done.

    Attributes:
        exclude: glob patterns of paths, relative to the root, that are not read.
        rules: identifiers to run; empty means all.
    """

    exclude: tuple[str, ...] = ()
    rules: frozenset[str] = frozenset()
