"""Mistakes of a user that do not depend on each other, and are reported together."""

from collections.abc import Iterator
from contextlib import contextmanager

from offbeat_core import ProblemsError, UserError


class Problems:
    """Collects what independent checks refuse, so that users do not fix one mistake only to meet the next."""

    def __init__(self) -> None:
        self._found: list[UserError] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep a user's mistake in the block for `raise_all`, and continue after the block."""
        try:
            yield
        except UserError as error:
            self._found.append(error)

    @property
    def texts(self) -> list[str]:
        """Return the texts of what was collected, each once."""
        return list(dict.fromkeys(str(error) for error in self._found))

    def raise_all(self) -> None:
        """Raise what was collected: the error itself where it is the only one, else one that says all of them."""
        if len(self.texts) > 1:
            raise ProblemsError(*self.texts)
        if self._found:
            raise self._found[0]
