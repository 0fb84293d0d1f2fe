"""Advantages, policy losses, preference losses and rollout correction for language models, over flat packed tokens.

torch is imported with the first name that needs it. `AlgorithmConfig`, `check_algorithm`, `resolve_correction`,
`has_signal`, `overlong_penalty`, `PreferenceConfig` and `check_preference` do not, so that a driver or a command line
can read and check settings at once.
"""

from typing import TYPE_CHECKING

from offbeat_core import load_lazily
from offbeat_objectives._config.algorithm import AlgorithmConfig
from offbeat_objectives._config.auto import resolve_correction
from offbeat_objectives._config.checks import check_algorithm
from offbeat_objectives._config.preference import PreferenceConfig, check_preference
from offbeat_objectives._signal import has_signal, overlong_penalty

if TYPE_CHECKING:
    from offbeat_objectives._advantages.advantages import compute_advantages
    from offbeat_objectives._advantages.critic import ValueLoss, compute_returns
    from offbeat_objectives._advantages.estimators import Advantages, RewardedSamples, gae_advantages
    from offbeat_objectives._correction import Correction, correct_rollouts
    from offbeat_objectives._divergence import Distillation, distill, kl_per_token
    from offbeat_objectives._losses import PolicyLoss, build_loss, sft_loss
    from offbeat_objectives._mismatch import summarise_mismatch
    from offbeat_objectives._packing import Packed, aggregate, pack, sequence_of_tokens, unpack
    from offbeat_objectives._preferences import (
        PreferenceLoss,
        dpo_losses,
        ipo_losses,
        kto_baseline,
        kto_losses,
        orpo_losses,
        reward_losses,
        simpo_losses,
    )
    from offbeat_objectives._surrogates import PolicyTokens, Surrogate
    from offbeat_objectives._trial import try_functions

__all__ = [
    "Advantages",
    "AlgorithmConfig",
    "Correction",
    "Distillation",
    "Packed",
    "PolicyLoss",
    "PolicyTokens",
    "PreferenceConfig",
    "PreferenceLoss",
    "RewardedSamples",
    "Surrogate",
    "ValueLoss",
    "aggregate",
    "build_loss",
    "check_algorithm",
    "check_preference",
    "compute_advantages",
    "compute_returns",
    "correct_rollouts",
    "distill",
    "dpo_losses",
    "gae_advantages",
    "has_signal",
    "ipo_losses",
    "kl_per_token",
    "kto_baseline",
    "kto_losses",
    "orpo_losses",
    "overlong_penalty",
    "pack",
    "resolve_correction",
    "reward_losses",
    "sequence_of_tokens",
    "sft_loss",
    "simpo_losses",
    "summarise_mismatch",
    "try_functions",
    "unpack",
]

__getattr__, __dir__ = load_lazily(
    __name__,
    {
        "_advantages.advantages": "compute_advantages",
        "_advantages.critic": "compute_returns ValueLoss",
        "_advantages.estimators": "Advantages gae_advantages RewardedSamples",
        "_correction": "correct_rollouts Correction",
        "_divergence": "distill Distillation kl_per_token",
        "_losses": "build_loss PolicyLoss sft_loss",
        "_mismatch": "summarise_mismatch",
        "_packing": "aggregate pack Packed sequence_of_tokens unpack",
        "_preferences": "dpo_losses ipo_losses kto_baseline kto_losses orpo_losses PreferenceLoss reward_losses"
        " simpo_losses",
        "_surrogates": "PolicyTokens Surrogate",
        "_trial": "try_functions",
    },
)
