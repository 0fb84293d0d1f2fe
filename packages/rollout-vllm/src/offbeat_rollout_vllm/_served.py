"""Which policy version a label of vLLM's stands for. Pure.

vLLM labels tokens with one number for the whole engine, and here the model and each adapter have versions of their own:
so the label counts updates, and this remembers what was served after each.
"""

from collections.abc import Iterable

MODEL = ""
"""The model without an adapter."""


class ServedVersions:
    """The versions after each update; label 0 is the start."""

    def __init__(self) -> None:
        self._after: list[dict[str, int]] = [{MODEL: 0}]

    @property
    def next_label(self) -> int:
        """Label of the next update."""
        return len(self._after)

    def update(self, version: int, adapter: str = MODEL) -> None:
        """Note an update. One of the model changes what every adapter samples."""
        before = self._after[-1]
        self._after.append(dict.fromkeys(before, version) if adapter == MODEL else before | {adapter: version})

    def segments(self, spans: Iterable[tuple[int, int]], adapter: str = MODEL) -> list[tuple[int, int]]:
        """(version, number of tokens) from (label, number of tokens), neighbours of one version joined.

        Tokens under a label from before the adapter's first update have that of the model.
        """
        found: list[tuple[int, int]] = []
        for label, count in spans:
            served = self._after[label]
            version = served.get(adapter, served[MODEL])
            if found and found[-1][0] == version:
                count += found.pop()[1]
            found.append((version, count))
        return found
