"""Settings of the monitor, and how they are read from the environment."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast, get_args

from offbeat_liveness._errors import LivenessError

Policy = Literal["report", "abort"]

STALL_AFTER: Final = "OFFBEAT_STALL_AFTER_S"
DIRECTORY: Final = "OFFBEAT_LIVENESS_DIR"
POLICY: Final = "OFFBEAT_LIVENESS_POLICY"
DEFAULT_STALL_AFTER_S: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the monitor does, and when.

    Args:
        stall_after_s: a wait this long is looked into, > 0.
        policy: "report" says what is stuck; "abort" also ends every process, with exit code 4.
        directory: where dumps are written; none without it.
        name: of this process; "" means "rank N" once the rank is known.
    """

    stall_after_s: float = DEFAULT_STALL_AFTER_S
    policy: Policy = "report"
    directory: Path | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.stall_after_s) and self.stall_after_s > 0):
            raise LivenessError(
                f"stall_after_s must be a number of seconds above 0: got {self.stall_after_s!r}; try 60"
            )
        if self.policy not in get_args(Policy):
            raise LivenessError(f"the policy of liveness is one of {', '.join(get_args(Policy))}: got {self.policy!r}")

    @property
    def tick_s(self) -> float:
        """Seconds between two looks at this process: a tenth of the stall, at most half a second.

        A stall is seen to begin up to one look late, and to have lasted too long up to another.
        """
        return min(0.5, max(0.05, self.stall_after_s / 10))


def read_settings(
    stall_after_s: float | None = None,
    policy: str | None = None,
    directory: str | Path | None = None,
    name: str = "",
    environment: Mapping[str, str] = os.environ,
) -> Settings:
    """Settings from arguments, else from the environment, else the defaults.

    Raises:
        LivenessError: a value is out of range.
    """
    folder = directory or environment.get(DIRECTORY)
    return Settings(
        stall_after_s=_seconds(environment) if stall_after_s is None else stall_after_s,
        policy=cast("Policy", policy or environment.get(POLICY) or "report"),
        directory=Path(folder).absolute() if folder else None,
        name=name,
    )


def _seconds(environment: Mapping[str, str]) -> float:
    text = environment.get(STALL_AFTER, "")
    try:
        return float(text) if text else DEFAULT_STALL_AFTER_S
    except ValueError as error:
        raise LivenessError(f"{STALL_AFTER} must be a number of seconds: got {text!r}; try {STALL_AFTER}=60") from error
