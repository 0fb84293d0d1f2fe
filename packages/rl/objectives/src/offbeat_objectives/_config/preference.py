"""The section "preference": which loss learns from preferences, and its numbers. Without torch.

A setting whose default is None belongs to some losses only, and has the default of theirs; `check_preference` refuses
it with another loss, because it would do nothing there.
"""

from dataclasses import dataclass
from typing import Final, Literal

from offbeat_core import ConfigError, setting

RowKind = Literal["conversations", "pairs", "ratings"]

PREFERENCE_LOSSES: Final = ("sft", "dpo", "ipo", "kto", "orpo", "simpo", "reward")
NEED_REFERENCE: Final = ("dpo", "ipo", "kto")
DEFAULT_BETAS: Final = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0}
DEFAULT_TARGET_MARGIN: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """Section `preference`: learn which of two answers is better, or that an answer is good or bad."""

    loss: str = setting(
        "sft",
        "What is learned. sft learns conversations as they are; dpo, ipo, orpo and simpo learn from rows of a chosen "
        "and a rejected answer, kto from answers that are good or bad. dpo, ipo and kto compare with the policy as it "
        "was before training; orpo and simpo need no reference. reward trains a reward model on rows of two answers: a "
        "classification head with one output (Bradley-Terry).",
        choices=PREFERENCE_LOSSES,
    )
    beta: float | None = setting(
        None,
        "How steeply log-probabilities count: the strength of the pull to the reference in dpo, ipo (tau) and kto, the "
        "weight of the odds ratio in orpo (lambda), the scale of the reward in simpo. If not given: 0.1; simpo 2.",
        gt=0,
    )
    label_smoothing: float | None = setting(
        None,
        "For dpo and simpo: the share of pairs that may be labelled the wrong way round. 0 if not given.",
        ge=0,
        lt=0.5,
    )
    target_margin: float | None = setting(
        None, "For simpo: by how much the reward of the chosen answer shall be larger (gamma). 0.5 if not given.", ge=0
    )
    desirable_weight: float | None = setting(None, "For kto: weight of the good answers. 1 if not given.", ge=0)
    undesirable_weight: float | None = setting(None, "For kto: weight of the bad answers. 1 if not given.", ge=0)
    likelihood: str | None = setting(
        None,
        "For orpo: tokens of the chosen rows whose likelihood is raised besides. whole: prompt and answer, as its "
        "authors' program does; answer: the answer alone, as its paper says, which computes a shared prompt once. "
        "whole if not given.",
        choices=("whole", "answer"),
    )
    center_rewards: float | None = setting(
        None,
        "For reward: weight of a term that holds the mean of the two rewards of a pair near 0, such as 0.01. 0 if not "
        "given.",
        ge=0,
    )

    @property
    def rows(self) -> RowKind:
        """Return what a row of the data has to be."""
        return "conversations" if self.loss == "sft" else "ratings" if self.loss == "kto" else "pairs"

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss compares with the log-probabilities of the policy before training."""
        return self.loss in NEED_REFERENCE

    @property
    def learns_prompts(self) -> bool:
        """Return whether the tokens of prompts enter the loss too, those of the chosen rows."""
        return self.loss == "orpo" and (self.likelihood or "whole") == "whole"

    @property
    def resolved_beta(self) -> float:
        """The given value, or the default of the loss."""
        return DEFAULT_BETAS[self.loss] if self.beta is None else self.beta

    @property
    def resolved_target_margin(self) -> float:
        """The given value, or the default."""
        return DEFAULT_TARGET_MARGIN if self.target_margin is None else self.target_margin


_BELONG_TO: Final = {
    "beta": tuple(DEFAULT_BETAS),
    "label_smoothing": ("dpo", "simpo"),
    "target_margin": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "likelihood": ("orpo",),
    "center_rewards": ("reward",),
}


def check_preference(config: PreferenceConfig) -> None:
    """Refuse a setting that would do nothing.

    Raises:
        ConfigError: all such settings in one text, a line each.
    """
    idle = [
        f"preference.{name} is of {', '.join(losses)} and does nothing with preference.loss = {config.loss!r}: leave "
        "it out, or choose another loss"
        for name, losses in _BELONG_TO.items()
        if getattr(config, name) is not None and config.loss not in losses
    ]
    if idle:
        raise ConfigError("\n".join(idle))
