"""The correction that `auto` stands for, once it is known how tokens are sampled.

Where the policy that samples differs from the one in training, by age or by arithmetic, tokens are weighed by
min(r, 2), r = π_train / π_rollout, in the decoupled form: the weight makes up for the sampler, and the loss's own ratio
and clip are around the policy before the update.

With one optimizer step an update that clip never acts: nothing then bounds how far the policy goes from the one that
sampled. So where samples are of older weights, ppo_clip takes the bypass form instead: its ratio, and its clip, are
against the sampler. Measured: docs/losses.md, "What is corrected by default".

A teacher and a KL penalty in the reward are compared with the policy in training. In the bypass form they would be
compared with the sampler: a policy that equals its teacher would still be moved, by as much as it has moved since.
There the form is decoupled for every loss.

The weight is of a token for every loss, also for those whose ratio is of a sequence (gspo, sapo, gmpo). Their gradient
is a sum over tokens, and each gets the weight of its own probability. The product over a sequence is the exact
weight, with a variance that grows with the length: where log r of a token has the deviation s, the effective sample
size of T tokens is exp(-T s²) of them, 1 in 7 for T = 8192 and s = 0.0155.

Sources: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
https://fengyao.notion.site/off-policy-rl (token weights, C = 2); AReaL, 2505.24298, section 5.2 (decoupled objective);
verl, docs/algo/rollout_corr.md (both joined; the bypass form, the default of its fully asynchronous trainer); DPPO,
2602.04879 (bounds the distance to the sampler).
"""

from dataclasses import replace

from offbeat_objectives._config.algorithm import AUTO, DPPO_LOSSES, AlgorithmConfig

_FORM = "algorithm.correction_form"
_CORRECTION = "algorithm.correction"


def resolve_correction(
    config: AlgorithmConfig, off_policy: str, unclipped: str = ""
) -> tuple[AlgorithmConfig, list[str]]:
    """Replace `auto` in `correction` and `correction_form`; what is written out stays.

    Args:
        config: as it was written.
        off_policy: why tokens may be sampled by another policy than the one in training; empty where weights, number
            format and engine are the same.
        unclipped: why a clip around the policy before the update would not bound how far the policy goes from older
            weights that sampled; empty where it would, or where none are older.

    Returns:
        The configuration without `auto`, and each choice with its reason.
    """
    form, said = config.correction_form, list[str]()
    if form == AUTO:
        form, why = _choose_form(config, unclipped)
        said.append(f"{_FORM} = {form} ({why})")
    correction = config.correction
    if correction == AUTO:
        correction, why = _choose_correction(config, form, off_policy)
        said.insert(0, f"{_CORRECTION} = {correction} ({why})")
    return replace(config, correction=correction, correction_form=form), said


def _choose_form(config: AlgorithmConfig, unclipped: str) -> tuple[str, str]:
    if config.compares_train_logprobs:
        compared = "the teacher" if config.needs_teacher else "the KL penalty in the reward"
        return "decoupled", f"{compared} is compared with the policy in training, in bypass with the one that sampled"
    asks_for_weights = config.tis_cap is not None or config.normalise_weights
    if unclipped and config.loss == "ppo_clip" and config.correction == AUTO and not asks_for_weights:
        return "bypass", unclipped
    if config.loss not in DPPO_LOSSES:
        return "decoupled", "the ratio is against the trainer's policy before the update"
    if config.correction == AUTO or not config.has_weights:
        return "bypass", f"{config.loss} bounds the distance to the policy that sampled"
    return "decoupled", f"{_CORRECTION} = {config.correction} has weights, which bypass refuses"


def _choose_correction(config: AlgorithmConfig, form: str, off_policy: str) -> tuple[str, str]:
    if form == "bypass":
        has_ratio = config.loss != "gpg"
        return "none", (
            f"with {_FORM} = bypass the ratio of {config.loss} corrects by itself"
            if has_ratio
            else f"gpg has no ratio, and {_FORM} = bypass computes no weights: nothing is corrected"
        )
    if off_policy:
        return "token_tis", off_policy
    return "none", "the engines sample with the trainer's weights, number format and kind of engine"
