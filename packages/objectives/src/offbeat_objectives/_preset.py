"""What a correction's name means: which weight, which rejection, and their numbers."""

from dataclasses import dataclass
from typing import Final

from offbeat_objectives._config import REJECTIONS, WEIGHTS, AlgorithmConfig

LOG_RATIO_BOUND: Final = 20.0
"""Log ratios are cut at ±20 before exp, so that one broken token cannot make the batch infinite."""

DEFAULT_CAP: Final = 2.0
DEFAULT_BOUNDS: Final = {"token": (0.5, 2.0), "sequence": (0.5, 2.0), "geometric": (0.999, 1.001)}
ICEPOP_BOUNDS: Final = (0.5, 5.0)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A correction's name taken apart, with every number in place. Bounds are bounds on r, never on 1/r or log r.

    Args:
        weight: "token", "sequence", "icepop" or None for no weight.
        cap: the weight is min(r, cap); None for no cap.
        rejection: "token", "sequence", "geometric" or None for none.
        low, high: the statistic r of the rejection (or of icepop) is kept in [low, high].
    """

    weight: str | None
    cap: float | None
    rejection: str | None
    low: float
    high: float


def read_preset(config: AlgorithmConfig) -> Preset:
    """Take `config.correction` apart and fill in its defaults."""
    name = config.correction
    weight = next((part.removesuffix("_tis") for part in WEIGHTS if name.startswith(part)), None)
    rejection = next((part.removesuffix("_rs") for part in REJECTIONS if name.endswith(part)), None)
    low, high = DEFAULT_BOUNDS[rejection] if rejection else ICEPOP_BOUNDS
    cap = None
    if weight and (config.tis_cap is not None or weight != rejection):
        # A rejection on the same statistic bounds r already; the default cap would then never bind.
        cap = config.tis_cap if config.tis_cap is not None else DEFAULT_CAP
    return Preset(
        weight="icepop" if name == "icepop" else weight,
        cap=cap,
        rejection=rejection,
        low=low if config.rs_low is None else config.rs_low,
        high=high if config.rs_high is None else config.rs_high,
    )
