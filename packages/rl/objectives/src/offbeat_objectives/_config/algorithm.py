"""The section "algorithm": its settings, and what a driver works out of them without torch.

A setting whose default is None has a default that depends on the choice it belongs to; `check_algorithm` refuses it
when that choice was not made, because it would then do nothing.
"""

from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple, TypeVar

from offbeat_core import setting

OptionsT = TypeVar("OptionsT")

AUTO: Final = "auto"
"""A correction, or its form, that `resolve_correction` chooses; unresolved it is none, in the decoupled form."""

WEIGHTS: Final = ("token_tis", "sequence_tis")
REJECTIONS: Final = ("token_rs", "sequence_rs", "geometric_rs")
CORRECTIONS: Final = (
    "none",
    *WEIGHTS,
    *REJECTIONS,
    *(f"{weight}_{rejection}" for weight in WEIGHTS for rejection in REJECTIONS),
    "icepop",
)
GROUP_ADVANTAGES: Final = ("grpo", "dr_grpo", "rloo", "opo", "gpg", "gdpo", "grpo_passk", "pass_at_k")
"""Advantages that are 0 where the samples of a prompt all got the same reward."""
COMPARING_ADVANTAGES: Final = (*GROUP_ADVANTAGES, "reinforce_plus_plus_baseline")
"""Advantages that compare the samples of one prompt."""
ADVANTAGES: Final = (*COMPARING_ADVANTAGES, "reinforce_plus_plus", "remax", "gae", "none")


class LossKind(NamedTuple):
    """Defaults of a policy loss; its formula is the function of its name in _surrogates.py.

    Args:
        clip: (clip_low, clip_high); None for a loss that does not clip.
        aggregation: of token losses, by the loss's definition.
        without_clip: what it has instead of a clip, for the error of a clip that would have no effect.
    """

    clip: tuple[float, float] | None = None
    aggregation: str = "token_mean"
    without_clip: str = "does not clip"


LOSS_KINDS: Final = {
    "ppo_clip": LossKind(clip=(0.2, 0.2)),
    "gspo": LossKind(clip=(3e-4, 4e-4), aggregation="sequence_mean"),
    "cispo": LossKind(clip=(1.0, 4.0)),  # the low bound of 1 - 1 = 0 never binds, as in its paper
    "sapo": LossKind(
        aggregation="sequence_mean",
        without_clip="has soft gates, set by tau_positive and tau_negative in options",
    ),
    "gmpo": LossKind(clip=(0.4, 0.4), aggregation="sequence_mean"),
    "clip_cov": LossKind(clip=(0.2, 0.2)),
    "kl_cov": LossKind(without_clip="holds back by a penalty, set by cov_share and kl_weight in options"),
    "gpg": LossKind(without_clip="has no ratio"),
    # A divergence is bounded, as its authors train (verl, examples/dppo_trainer), and summed over a sequence.
    "dppo_tv": LossKind(clip=(0.15, 0.15), aggregation="fixed_length"),
    "dppo_kl": LossKind(clip=(0.05, 0.05), aggregation="fixed_length"),
}
DPPO_LOSSES: Final = ("dppo_tv", "dppo_kl")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Settings of the objective: advantage, loss, Kullback-Leibler penalty and rollout correction."""

    advantage: str = setting(
        "grpo",
        "How rewards become advantages. grpo, dr_grpo, rloo, opo, gpg, gdpo (each reward by itself), grpo_passk and "
        "pass_at_k (the best of k) compare the samples of one prompt; reinforce_plus_plus normalises over the batch, "
        "with _baseline after the prompt's mean; remax subtracts the greedy reward; gae asks a critic, trained "
        "beside the policy; none leaves rewards out, and only a teacher teaches. Or a Python function as "
        "module:function, which gets RewardedSamples and this section and returns Advantages.",
        path="function",
    )
    gamma: float = setting(1.0, "Discount per token, for reinforce_plus_plus and gae.", "per token", gt=0, le=1)
    gae_lambda: float | None = setting(
        None, "Trade between bias (0) and variance (1) of gae; 0.95 if not given.", ge=0, le=1
    )
    loss: str = setting(
        "ppo_clip",
        "The policy objective: ppo_clip, gspo, cispo, sapo (gates where the others clip), gmpo, clip_cov and kl_cov "
        "(hold back tokens that lower the entropy most), gpg (no ratio), dppo_tv and dppo_kl (bound a divergence), or "
        "a Python function as module:function, which gets PolicyTokens and this section and returns a Surrogate.",
        path="function",
    )
    clip_low: float | None = setting(
        None,
        "How far below 1 the ratio may go: to 1 - clip_low (gmpo: to exp(-clip_low); dppo: the divergence itself). If "
        "not given: ppo_clip and clip_cov 0.2, gspo 0.0003, cispo 1 (no bound), gmpo 0.4, dppo_tv 0.15, dppo_kl 0.05.",
        "ratio (gmpo, dppo_kl: nats; dppo_tv: probability)",
        gt=0,
    )
    clip_high: float | None = setting(
        None,
        "How far above 1 the ratio may go: to 1 + clip_high (gmpo: to exp(clip_high); dppo: the divergence itself). "
        "More than clip_low is DAPO's clip-higher, such as 0.28. If not given: ppo_clip and clip_cov 0.2, gspo 0.0004, "
        "cispo 4, gmpo 0.4, dppo_tv 0.15, dppo_kl 0.05.",
        "ratio (gmpo, dppo_kl: nats; dppo_tv: probability)",
        gt=0,
    )
    dual_clip: float | None = setting(
        None, "Bound on the ratio where the advantage is negative, for ppo_clip; such as 3. Off if not given.", gt=1
    )
    options: dict[str, Any] = setting(
        {},
        "Numbers of the chosen loss and advantage, by name, such as {k = 8} for pass_at_k; docs/losses.md has them. "
        "off_policy_mask is of every loss. A function of one's own reads config.options.",
    )
    aggregation: str | None = setting(
        None,
        "How token losses become one number: token_mean weighs all tokens of the update alike, sequence_mean all "
        "sequences alike, fixed_length divides each sequence's sum by one constant. If not given, as in the loss's "
        "paper: sequence_mean for gspo, sapo and gmpo, fixed_length for dppo; token_mean for the others.",
        choices=("token_mean", "sequence_mean", "fixed_length"),
    )
    fixed_length: int | None = setting(
        None, "The constant of fixed_length, usually the longest completion allowed.", "tokens", ge=1
    )
    kl_coefficient: float = setting(0.0, "Weight of the KL penalty towards the reference policy; 0: none.", ge=0)
    kl_estimator: str | None = setting(
        None,
        "k1, k2, k3, or k3_capped: k3 of at most 10, without gradient beyond, as verl computes it. If not given, k3 in "
        "the loss and k1 in the reward.",
        "nats",
        choices=("k1", "k2", "k3", "k3_capped"),
    )
    kl_in: str = setting("loss", "Where the KL penalty enters: the loss or the reward.", choices=("loss", "reward"))
    kl_ratio_weight: bool | None = setting(
        None,
        "Weigh the KL penalty in the loss by the policy's probability / that of the policy that sampled, cut at "
        "tis_cap (2 if not given), so that its gradient is that of KL(policy, reference) on samples of other weights "
        "too. On if not given.",
    )
    entropy_coefficient: float = setting(0.0, "Weight of the entropy bonus; 0: none.", ge=0)
    correction: str = setting(
        AUTO,
        "What is done about r = trainer's probability / rollout's probability: tis weighs by r, cut at tis_cap; "
        "rs rejects what leaves [rs_low, rs_high]; icepop weighs by r and drops what leaves the bounds; none: nothing. "
        "auto: token_tis where samples may be of older weights, another number format or another engine, else none.",
        choices=(AUTO, *CORRECTIONS),
    )
    correction_form: str = setting(
        AUTO,
        "decoupled: the loss's ratio is against the trainer's policy before the update, recomputed where an update has "
        "several steps; bypass: against the rollout's log-probabilities, and nothing is recomputed. auto: bypass for "
        "dppo_tv and dppo_kl, which bound the distance to the sampler, and ppo_clip with one step on older samples; "
        "decoupled for others, and with a teacher or a KL penalty in the reward.",
        choices=(AUTO, "decoupled", "bypass"),
    )
    mismatch_alarm_nats: float | None = setting(
        None,
        "Say so once the 99th percentile of |log r| of tokens without lag is above this. If not given, by the formats "
        "of trainer and engines: 0.05 where both are float32, 0.5 with bfloat16 or float16, 2 with "
        "experts in these or with fp8 weights.",
        "nats",
        gt=0,
    )
    tis_cap: float | None = setting(None, "C: the largest weight of tis; 2 if not given.", "r", gt=0)
    rs_low: float | None = setting(
        None, "Least statistic kept. If not given: token and sequence 0.5, geometric 0.999, icepop 0.5.", "r", ge=0
    )
    rs_high: float | None = setting(
        None, "Largest statistic kept. If not given: token and sequence 2, geometric 1.001, icepop 5.", "r", gt=0
    )
    normalise_weights: bool = setting(
        False, "Divide correction weights by their mean over the kept tokens or sequences of the global batch."
    )
    num_passes: int = setting(
        1,
        "How often an update goes over its samples: one optimizer step for each mini batch in each pass, in the same "
        "order. The old policy, corrections and advantages stay those of before the first step.",
        "passes",
        ge=1,
    )
    mask_truncated: bool = setting(
        False,
        "Leave tokens of samples that a limit has cut off out of the loss and of what it divides by; they still count "
        "in the mean of their prompt.",
    )
    filter_groups: bool = setting(
        False,
        "Drop prompts whose samples teach nothing, and draw others (DAPO's dynamic sampling): those of one reward, "
        "before the overlong penalty; with gdpo those where no weighted reward differs.",
    )
    overlong_buffer_tokens: int = setting(
        0, "Length before the limit over which a penalty grows from 0 to its full size; 0: none.", "tokens", ge=0
    )
    overlong_penalty_factor: float | None = setting(
        None, "Full size of the overlong penalty; 1 if not given.", "reward", gt=0
    )

    distillation_coefficient: float = setting(
        0.0, "Weight of the divergence from the teacher, KL(policy, teacher) on the policy's samples; 0: none.", ge=0
    )
    distillation_discount: float | None = setting(
        None,
        "How far a token answers for the divergence of those after it: 0, if not given, not at all (GKD); 1 to the end "
        "of the sample (MiniLLM).",
        "per token",
        ge=0,
        le=1,
    )

    @property
    def needs_teacher(self) -> bool:
        """Return whether log-probabilities of a teacher are needed."""
        return self.distillation_coefficient > 0

    @property
    def needs_critic(self) -> bool:
        """Return whether a critic's values of the tokens are needed."""
        return self.advantage == "gae"

    @property
    def needs_reward(self) -> bool:
        """Return whether anything is learned from rewards."""
        return self.advantage != "none"

    @property
    def weighs_kl(self) -> bool:
        """Return whether the KL penalty in the loss is weighted by the ratio to the policy that sampled."""
        return self.needs_reference and self.kl_in == "loss" and self.kl_ratio_weight is not False

    @property
    def needs_reference(self) -> bool:
        """Return whether log-probabilities of the reference policy are needed."""
        return self.kl_coefficient > 0

    def needs_train_logprobs(self, *, single_step: bool = False) -> bool:
        """Return whether the trainer must recompute log-probabilities before an update (extra `old_logprobs`).

        Args:
            single_step: an update is one optimizer step. The old policy is then the one in training, and the ratio is
                1: nothing is recomputed, unless weights are normalised over the global batch, or a penalty in the
                reward or a teacher needs the numbers before the loss. Corrections are then computed in the loss.
        """
        if self.correction_form == "bypass":
            return False
        return not single_step or self.normalise_weights or self.compares_train_logprobs

    @property
    def compares_train_logprobs(self) -> bool:
        """Return whether a teacher, or a KL penalty in the reward, is compared with the policy in training."""
        return self.needs_teacher or (self.needs_reference and self.kl_in == "reward")

    @property
    def corrects(self) -> bool:
        """Return whether a rollout correction weighs or rejects tokens."""
        return self.correction not in (AUTO, "none")

    @property
    def has_weights(self) -> bool:
        """Return whether the rollout correction weighs tokens."""
        return self.correction.startswith(WEIGHTS) or self.correction == "icepop"

    @property
    def needs_entropy_gradient(self) -> bool:
        """Return whether the engine must let the entropy carry gradient."""
        return self.entropy_coefficient > 0

    @property
    def needs_greedy_reward(self) -> bool:
        """Return whether each prompt needs the reward of one greedy completion."""
        return self.advantage == "remax"

    @property
    def has_own_loss(self) -> bool:
        """Return whether the policy objective is a function that the user wrote."""
        return ":" in self.loss

    @property
    def has_own_advantage(self) -> bool:
        """Return whether advantages come from a function that the user wrote."""
        return ":" in self.advantage

    def read_options(self, kind: type[OptionsT]) -> OptionsT:
        """Return the options of one loss or advantage: those given that it has, and defaults."""
        known = {each.name for each in fields(kind)}  # type: ignore[arg-type]
        return kind(**{name: value for name, value in self.options.items() if name in known})

    @property
    def resolved_gae_lambda(self) -> float:
        """λ of gae in use."""
        return 0.95 if self.gae_lambda is None else self.gae_lambda

    @property
    def resolved_kl_estimator(self) -> str:
        """The KL estimator in use: given, or the usual one of its place."""
        return self.kl_estimator or ("k3" if self.kl_in == "loss" else "k1")

    @property
    def resolved_aggregation(self) -> str:
        """The aggregation in use: given, or that of the loss's own paper."""
        return self.aggregation or LOSS_KINDS.get(self.loss, LossKind()).aggregation

    def clip_range(self) -> tuple[float, float]:
        """(clip_low, clip_high) in use; those of ppo_clip for a loss of one's own. The loss must be one that clips."""
        clip = LOSS_KINDS["ppo_clip" if self.has_own_loss else self.loss].clip
        assert clip is not None
        low, high = clip
        return (low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high)


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


SAME_REWARD: Final = 1e-6
"""Rewards closer than this count as equal: sums of weighted rewards differ in their last digits."""
