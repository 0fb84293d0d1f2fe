"""Losses that learn from preferences, over `LossTokens`: DPO, IPO, KTO, ORPO, SimPO, and Bradley-Terry for rewards.

Each is a function of what the answers score, with its source; `PreferenceLoss` reads those scores off the tokens.

Shapes: N loss tokens and S sequences of a micro-batch, P pairs of them (S = 2 P).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from offbeat_core import DeferredMetrics, Floats, LossTokens, Metrics, ShapeError, TrainSequence
from offbeat_objectives._config.preference import PreferenceConfig
from offbeat_objectives._packing import Measure, defer_metrics, require_tokens, segment_sum, sequence_of_tokens

SIGN: Final = "sign"
PAIR: Final = "pair"
REFERENCE: Final = "reference"
ANSWER: Final = "answer"
LIKELIHOOD: Final = "likelihood"
BASELINE: Final = "baseline"

_LARGEST_LOGPROB: Final = -1e-7
"""Log-probability of an answer that is all but certain: its odds stay finite in float32."""


def dpo_losses(chosen_P: Tensor, rejected_P: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """[P]: -log σ(β·(chosen - rejected)), of log-probability ratios to the reference, summed over each answer.

    Source: DPO (arXiv:2305.18290, equation 7); with label smoothing ε conservative DPO,
    (1 - ε)·L(chosen over rejected) + ε·L(rejected over chosen) (arXiv:2305.18290's authors, ericmitchell.ai/cdpo.pdf).
    """
    margin_P = beta * (chosen_P - rejected_P)
    return -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)


def ipo_losses(chosen_P: Tensor, rejected_P: Tensor, *, beta: float) -> Tensor:
    """[P]: (chosen - rejected - 1 / 2β)², of the mean log-probability ratio over each answer's tokens.

    Source: IPO (arXiv:2310.12036, equation 17, where β is τ); the mean over tokens as TRL computes it, on the word of
    the authors.
    """
    return (chosen_P - rejected_P - 1 / (2 * beta)) ** 2


def simpo_losses(
    chosen_P: Tensor, rejected_P: Tensor, *, beta: float, target_margin: float, label_smoothing: float = 0.0
) -> Tensor:
    """[P]: -log σ(β·(chosen - rejected) - γ), of mean log-probabilities of each answer's tokens.

    Source: SimPO (arXiv:2405.14734, equation 6); label smoothing as in `dpo_losses`.
    """
    margin_P = beta * (chosen_P - rejected_P) - target_margin
    return -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)


def orpo_losses(chosen_P: Tensor, rejected_P: Tensor, *, beta: float) -> Tensor:
    """[P]: -λ·log σ(log odds(chosen) - log odds(rejected)), odds p / (1 - p) of mean log-probabilities; λ is `beta`.

    The likelihood of the chosen answers, ORPO's other term, is added up over tokens: see `PreferenceLoss`.
    Source: ORPO (arXiv:2403.07691, equations 4 and 7).
    """
    log_odds_P = (chosen_P - rejected_P) - (_log_complement(chosen_P) - _log_complement(rejected_P))
    return -beta * logsigmoid(log_odds_P)


def kto_losses(
    ratio_S: Tensor,
    good_S: Tensor,
    baseline_S: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """[S]: λ_D·(1 - σ(β·(ratio - z₀))) of a good answer, λ_U·(1 - σ(β·(z₀ - ratio))) of a bad one.

    Source: KTO (arXiv:2402.01306, equations 7 and 8).

    Args:
        ratio_S: log-probability ratio to the reference, summed over each answer.
        good_S: bool.
        baseline_S: z₀, of `kto_baseline`, alike for all.
        beta: how steep the value of a gain is.
        desirable_weight: λ_D.
        undesirable_weight: λ_U.
    """
    gain_S = torch.where(good_S, ratio_S - baseline_S, baseline_S - ratio_S)
    weight_S = undesirable_weight + (desirable_weight - undesirable_weight) * good_S.to(ratio_S.dtype)
    return weight_S * (1 - torch.sigmoid(beta * gain_S))


def kto_baseline(logprobs: list[float], reference: list[float]) -> float:
    """z₀: the mean log-probability ratio of answers to the prompts of others, at least 0, nats.

    Source: KTO (arXiv:2402.01306, section 4.1), an estimate of the policy's divergence from the reference.

    Args:
        logprobs: of each such answer, summed.
        reference: the same under the reference.
    """
    if not logprobs:
        return 0.0
    return max(0.0, math.fsum(one - other for one, other in zip(logprobs, reference, strict=True)) / len(logprobs))


def reward_losses(chosen_P: Tensor, rejected_P: Tensor, *, center: float = 0.0) -> Tensor:
    """[P]: -log σ(chosen - rejected) + c·(chosen + rejected)², of the rewards of a model with one output.

    Source: Bradley-Terry as in InstructGPT (arXiv:2203.02155, equation 1); the second term centers rewards
    (arXiv:2312.09244, section 3).
    """
    return -logsigmoid(chosen_P - rejected_P) + center * (chosen_P + rejected_P) ** 2


def _log_complement(logprob: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, without loss of digits near 0 and far from it (Mächler 2012, equation 7)."""
    x = logprob.clamp(max=_LARGEST_LOGPROB)
    is_near = x > -math.log(2)
    near = torch.log(-torch.expm1(torch.where(is_near, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(is_near, -1.0, x)))
    return torch.where(is_near, near, far)


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of one `PreferenceConfig`; a `LossFunction`. The mean over the pairs (kto: answers) of the update.

    Extras it reads, each [N] float32; of those with a star all tokens of a sequence hold the same number:
        sign*: 1 of a chosen or good answer, -1 of a rejected or bad one.
        pair*: number of the pair within the update. Both of a pair lie in one micro-batch (`TrainSequence.group`).
        reference: nats, of the reference policy; for dpo, ipo and kto.
        baseline*: z₀ of the update; for kto.
        answer: 1 where a token is of the answer, 0 where it is of the prompt; for orpo.
        likelihood: 1 / number of tokens of the update whose likelihood is raised, at those; 0 at others; for orpo.

    Of a model with a score head (loss `reward`) each sequence has one loss token, and its log-probability is the score.
    """

    config: PreferenceConfig

    @property
    def required_extras(self) -> tuple[str, ...]:
        """Names that `LossTokens.extras` must hold."""
        kto, orpo = self.config.loss == "kto", self.config.loss == "orpo"
        return (
            SIGN,
            *([] if kto else [PAIR]),
            *([REFERENCE] if self.config.needs_reference else []),
            *([BASELINE] if kto else []),
            *([ANSWER, LIKELIHOOD] if orpo else []),
        )

    def __call__(self, tokens: LossTokens[Any]) -> tuple[Tensor, DeferredMetrics]:
        """Return one micro-batch's share of the update's loss.

        Returns:
            A scalar that carries gradient, and the metrics `loss/…`, `rewards/…` and `logps/…` (not of a reward model).

        Raises:
            ShapeError: an extra is missing or has another shape, or a pair is not whole.
        """
        missing = [name for name in self.required_extras if name not in tokens.extras]
        if missing:
            raise ShapeError(f"the loss {self.config.loss} needs the extras {list(self.required_extras)}: no {missing}")
        require_tokens("the loss", tokens.sequence_N, tokens.logprobs_N, *tokens.extras.values())
        answers = _Answers.read(tokens)
        return self._kto(tokens, answers) if self.config.loss == "kto" else self._compare(tokens, answers)

    def measure(self, sequences: Sequence[TrainSequence], logprobs: Sequence[Floats]) -> Metrics:
        """Metrics of sequences whose log-probabilities are known, as if all were one micro-batch; in float64.

        Args:
            sequences: with the extras above.
            logprobs: of each, [T] nats, as `TrainEngine.logprobs` gives them.
        """

        def flat(arrays: Sequence[Floats]) -> Tensor:
            pieces = [torch.from_numpy(array[each.loss_mask]) for array, each in zip(arrays, sequences, strict=True)]
            return torch.cat(pieces).double()

        counts_S = torch.tensor([int(each.loss_mask.sum()) for each in sequences])
        logprobs_N = flat(logprobs)
        tokens = LossTokens(
            logprobs_N=logprobs_N,
            entropy_N=torch.zeros_like(logprobs_N),
            sequence_N=sequence_of_tokens(counts_S),
            num_sequences=len(sequences),
            extras={name: flat([each.extras[name] for each in sequences]) for name in sequences[0].extras},
            total_tokens=len(logprobs_N),
            total_sequences=len(sequences),
        )
        return self(tokens)[1].read()

    def _compare(self, tokens: LossTokens[Any], answers: "_Answers") -> tuple[Tensor, DeferredMetrics]:
        chosen_P, rejected_P = _find_pairs(answers.sign_S, _constant(tokens, PAIR))
        losses_P, reward_S = self._of_pairs(answers, chosen_P, rejected_P)
        loss = losses_P.sum() / max(tokens.total_sequences / 2, 1)
        measures: dict[str, Measure] = {}
        if self.config.loss == "orpo":
            likelihood = -(tokens.logprobs_N * tokens.extras[LIKELIHOOD]).sum()
            measures["loss/odds_ratio"], measures["loss/nll"] = (loss, 1.0, "sum"), (likelihood, 1.0, "sum")
            loss = loss + likelihood
        measures["loss/total"] = (loss, 1.0, "sum")
        if num_pairs := len(chosen_P):
            margin_P = (reward_S[chosen_P] - reward_S[rejected_P]).detach()
            measures["rewards/margins"] = (margin_P.mean(), num_pairs, "mean")
            measures["rewards/accuracies"] = ((margin_P > 0).to(margin_P.dtype).mean(), num_pairs, "mean")
        return loss, defer_metrics(measures | self._measures(answers, reward_S))

    def _of_pairs(self, answers: "_Answers", chosen_P: Tensor, rejected_P: Tensor) -> tuple[Tensor, Tensor]:
        """[P] losses and [S] rewards."""
        config = self.config
        if config.loss == "reward":
            score_S = answers.logps_S
            center = config.center_rewards or 0.0
            return reward_losses(score_S[chosen_P], score_S[rejected_P], center=center), score_S
        beta, smoothing = config.resolved_beta, config.label_smoothing or 0.0
        ratio_S, length_S = answers.ratio_S, answers.length_S
        mean_S = (ratio_S if config.loss == "ipo" else answers.logps_S) / length_S
        chosen, rejected = mean_S[chosen_P], mean_S[rejected_P]
        if config.loss == "dpo":
            losses_P = dpo_losses(ratio_S[chosen_P], ratio_S[rejected_P], beta=beta, label_smoothing=smoothing)
        elif config.loss == "ipo":
            losses_P = ipo_losses(chosen, rejected, beta=beta)
        elif config.loss == "orpo":
            losses_P = orpo_losses(chosen, rejected, beta=beta)
        else:
            margin = config.resolved_target_margin
            losses_P = simpo_losses(chosen, rejected, beta=beta, target_margin=margin, label_smoothing=smoothing)
        return losses_P, beta * (ratio_S if config.needs_reference else mean_S)

    def _kto(self, tokens: LossTokens[Any], answers: "_Answers") -> tuple[Tensor, DeferredMetrics]:
        config, baseline_S = self.config, _constant(tokens, BASELINE)
        losses_S = kto_losses(
            answers.ratio_S,
            answers.sign_S > 0,
            baseline_S,
            beta=config.resolved_beta,
            desirable_weight=1.0 if config.desirable_weight is None else config.desirable_weight,
            undesirable_weight=1.0 if config.undesirable_weight is None else config.undesirable_weight,
        )
        loss = losses_S.sum() / max(tokens.total_sequences, 1)
        measures: dict[str, Measure] = {"loss/total": (loss, 1.0, "sum")}
        if len(baseline_S):
            measures["loss/baseline"] = (baseline_S.mean(), len(baseline_S), "mean")
        return loss, defer_metrics(measures | self._measures(answers, config.resolved_beta * answers.ratio_S))

    def _measures(self, answers: "_Answers", reward_S: Tensor) -> dict[str, Measure]:
        """Means over the chosen and over the rejected answers; left out where there is none."""
        found: dict[str, Measure] = {}
        values = {"rewards": reward_S}
        if self.config.loss != "reward":
            values["logps"] = answers.logps_S / answers.length_S if self.config.loss in _OF_MEANS else answers.logps_S
        for side, of_side_S in (("chosen", answers.sign_S > 0), ("rejected", answers.sign_S < 0)):
            count = of_side_S.sum()
            for name, each in values.items():
                found[f"{name}/{side}"] = (each.where(of_side_S, 0.0).sum() / count.clamp(min=1), count, "mean")
        return found


_OF_MEANS: Final = ("orpo", "simpo")
"""Losses on mean log-probabilities, whose logs show these."""


@dataclass(frozen=True)
class _Answers:
    """Sums over each sequence's answer: log-probabilities, their ratios to the reference, and tokens."""

    logps_S: Tensor
    ratio_S: Tensor
    length_S: Tensor
    sign_S: Tensor

    @classmethod
    def read(cls, tokens: LossTokens[Any]) -> "_Answers":
        def total(values_N: Tensor) -> Tensor:
            return segment_sum(values_N * answer_N, tokens.sequence_N, tokens.num_sequences)

        logprobs_N = tokens.logprobs_N
        answer_N = tokens.extras.get(ANSWER, torch.ones_like(logprobs_N)).to(logprobs_N.dtype)
        reference_N = tokens.extras.get(REFERENCE)
        logps_S = total(logprobs_N)
        ratio_S = logps_S if reference_N is None else total(logprobs_N - reference_N)
        return cls(logps_S, ratio_S, total(torch.ones_like(logprobs_N)), _constant(tokens, SIGN))


def _constant(tokens: LossTokens[Any], name: str) -> Tensor:
    """[S]: what all tokens of a sequence hold."""
    sequence_N: Tensor = tokens.sequence_N
    values_N: Tensor = tokens.extras[name]
    first_S = torch.searchsorted(sequence_N, torch.arange(tokens.num_sequences, device=sequence_N.device))
    return values_N[first_S]


def _find_pairs(sign_S: Tensor, pair_S: Tensor) -> tuple[Tensor, Tensor]:
    """[P] indices of the chosen answers and [P] of the rejected ones, in the order of pairs."""
    sides = []
    for side in (1, -1):
        index = (sign_S == side).nonzero()[:, 0]
        sides.append(index[pair_S[index].argsort()])
    chosen_P, rejected_P = sides
    if len(chosen_P) != len(rejected_P) or not torch.equal(pair_S[chosen_P], pair_S[rejected_P]):
        raise ShapeError(
            "a pair needs one chosen and one rejected answer in one micro-batch: give both the same TrainSequence.group"
        )
    return chosen_P, rejected_P
