"""Settings of the monitor, how they are read from the environment, and what a caller can put right."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast, get_args

Policy = Literal["report", "abort", "replace", "strict"]
STALL_AFTER: Final = "OFFBEAT_STALL_AFTER_S"
DIRECTORY: Final = "OFFBEAT_LIVENESS_DIR"
POLICY: Final = "OFFBEAT_LIVENESS_POLICY"
GRACE: Final = "OFFBEAT_LIVENESS_GRACE_S"
DEFAULT_STALL_AFTER_S: Final = 60.0
DEFAULT_GRACE_S: Final = 10.0


class LivenessError(ValueError):
    """A setting is out of range, or a script or folder is missing; says what was required, and what was got."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the monitor.

    Args:
        stall_after_s: a wait this long is looked into, > 0.
        policy: "report" says what is stuck; "abort" also ends every process, with exit code 4, once a hang is proved,
            or suspected and the timeout of what is waited in is over; "replace" does so too, but for a process that has
            ended, whose place a supervisor gives to another one, it waits for that timeout; "strict" ends every process
            on a suspicion too.
        directory: where dumps are written; none without it.
        name: of this process; "" means "rank N" once the rank is known.
        grace_s: how long a process that stands in no wait may keep running when a run is ended, >= 0.
    """

    stall_after_s: float = DEFAULT_STALL_AFTER_S
    grace_s: float = DEFAULT_GRACE_S
    policy: Policy = "report"
    directory: Path | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.stall_after_s) and self.stall_after_s > 0):
            raise LivenessError(
                f"stall_after_s must be a number of seconds above 0: got {self.stall_after_s!r}; try 60"
            )
        if not (math.isfinite(self.grace_s) and self.grace_s >= 0):
            raise LivenessError(f"{GRACE} must be a number of seconds from 0: got {self.grace_s!r}; try 10")
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
        stall_after_s=_seconds(environment, STALL_AFTER, DEFAULT_STALL_AFTER_S)
        if stall_after_s is None
        else stall_after_s,
        grace_s=_seconds(environment, GRACE, DEFAULT_GRACE_S),
        policy=cast("Policy", policy or environment.get(POLICY) or "report"),
        directory=Path(folder).absolute() if folder else None,
        name=name,
    )


def _seconds(environment: Mapping[str, str], variable: str, default_s: float) -> float:
    text = environment.get(variable, "")
    try:
        return float(text) if text else default_s
    except ValueError as error:
        raise LivenessError(
            f"{variable} must be a number of seconds: got {text!r}; try {variable}={default_s:g}"
        ) from error
