"""The name of a role process, as its kind and its number: every log, error and table shows it as "rollout-3"."""

from dataclasses import dataclass

from offbeat_core._errors import ConfigError


@dataclass(frozen=True, order=True)
class RoleName:
    """Name of one role process of a run. Names sort by kind, then by number.

    Args:
        kind: of the role, such as "rollout".
        index: among the roles of its kind, from 0.
    """

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return f"{self.kind}-{self.index}"

    @classmethod
    def parse(cls, text: str) -> "RoleName":
        """Read a name from a file or from what a user typed, such as "rollout-3".

        Raises:
            ConfigError: it is not a kind and a number with a hyphen between them.
        """
        kind, _, index = text.rpartition("-")
        if not kind or not (index.isascii() and index.isdecimal()):
            raise ConfigError(f"a role is named by its kind and its number, such as rollout-0: got {text!r}")
        return cls(kind, int(index))
