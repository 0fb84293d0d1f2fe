"""Causes that fresh single turns of text do not show: images, later turns, ends, draws, and an engine that is gone."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import numpy as np

from grpo_async_app._diagnosis.causes import SIDES, Diagnosis, Finding, Side
from grpo_async_app._diagnosis.evidence import Evidence, ExaminedSample, LaggedTokens, by_lag, is_beyond_rounding
from grpo_async_app._roles.reference import AS_SET
from offbeat_core import Floats

_SURE_NATS: Final = 15.0
"""Log-likelihood that a reading of the settings must gain: by chance one diagnosis in 100,000 has such a reading."""
_ASKED: Final = 12
"""Samples, about, whose likelihood is asked for: each costs a pass, and a reading of the whole vocabulary for each."""
_FAR_NATS: Final = 0.1
"""Mean |difference| of a token from which samples of a run count as far from what is computed now."""
_TIMES_FARTHER: Final = 5.0

ExplainImages = Callable[[Sequence[ExaminedSample], Side], Awaitable[Mapping[str, float]]]
"""Asks the reference which reading of the images gives the log-probabilities of a side."""
ExplainDrawn = Callable[[Sequence[ExaminedSample]], Awaitable[Mapping[str, float]]]
"""Asks the reference how likely samples are under readings of the sampling settings; see `ReferenceRole`."""


async def add_input_findings(
    evidence: Evidence, found: Diagnosis, explain_images: ExplainImages, explain_drawn: ExplainDrawn
) -> None:
    """Add to what `find_causes` has found, and put the largest cause first."""
    found.findings += await _image_findings(evidence, found, explain_images)
    found.findings += _turn_findings(evidence.lagged)
    found.findings += _earlier_findings(evidence)
    found.findings += _end_findings(evidence)
    found.findings += await _drawn_findings(evidence, found, explain_drawn)
    found.findings.sort(key=lambda finding: -finding.nats)


async def _image_findings(evidence: Evidence, found: Diagnosis, explain: ExplainImages) -> list[Finding]:
    """Compare what the sides compute of prompts with images, where they are right about text."""
    findings = []
    for side in SIDES:
        values, wanted, rounding = (
            _joined(evidence.pictured, side, what) for what in ("held", "reference", "rounding")
        )
        if _has_finding(found, side) or not is_beyond_rounding(values, wanted, rounding):
            continue
        readings = await explain(evidence.pictured, side)
        best = min(readings, key=lambda name: readings[name])
        explained = best != AS_SET and readings[best] < 0.1 * readings[AS_SET]
        what = best if explained else "how they are prepared, the tower, or the positions of their tokens"
        text = f"the {side} is right about text and not about prompts with images: {what}"
        nats = float(np.abs(values - wanted).mean())
        findings.append(Finding(kind="inputs", where=f"{side}: images", text=text, nats=nats))
    return findings


def _joined(samples: Sequence[ExaminedSample], side: Side, what: str) -> Floats:
    """[N] of all samples: what a side held, the reference has, or rounding explains."""
    parts, is_engine = [], side == "rollout engine"
    for sample in samples:
        held, rounded = sample.trained, sample.rounded_trainer
        if is_engine:
            held, rounded = sample.sampled, sample.rounded_engine
        of_sample = {"held": held, "reference": sample.reference, "rounding": np.abs(rounded - sample.reference)}
        parts.append(of_sample[what])
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _has_finding(found: Diagnosis, side: Side) -> bool:
    return any(finding.where.startswith(side) for finding in found.findings)


def _turn_findings(lagged: Sequence[LaggedTokens]) -> list[Finding]:
    """Compare later turns of the run with first ones of the same lag."""
    first = {each.lag: float(each.errors.mean()) for each in lagged if not each.is_later_turn}
    for each in lagged:
        if not each.is_later_turn or each.lag not in first:
            continue
        nats, before = float(each.errors.mean()), first[each.lag]
        if nats > _TIMES_FARTHER * before + _FAR_NATS:
            text = (
                f"later turns of the run differ by {nats:.3g} nats a token and first ones by {before:.3g}: between "
                "turns the engine read other tokens than the trajectory holds, or kept keys and values of other ones"
            )
            return [Finding(kind="inputs", where="run: later turns", text=text, nats=nats - before)]
    return []


def _earlier_findings(evidence: Evidence) -> list[Finding]:
    """Compare samples of the run by the same weights with fresh ones: what differs was in the engine of then."""
    held = next((float(each.errors.mean()) for each in by_lag(evidence.lagged) if each.lag == 0), 0.0)
    errors = [np.abs(sample.sampled - sample.trained) for sample in evidence.samples]
    fresh = float(np.concatenate(errors).mean()) if errors else 0.0
    if held <= _TIMES_FARTHER * fresh + _FAR_NATS:
        return []
    text = (
        f"samples of the run without lag differ by {held:.3g} nats a token and fresh ones by {fresh:.3g}: the engine "
        "that sampled them held something that a new one does not"
    )
    return [Finding(kind="state", where="run: the engine that sampled", text=text, nats=held - fresh)]


def _end_findings(evidence: Evidence) -> list[Finding]:
    if evidence.num_cut_short:
        text = (
            f"{evidence.num_cut_short} of {len(evidence.samples)} samples end before max_tokens without a token that "
            "ends them: the rollout engine has another limit, or stops at other tokens than the model folder names"
        )
        return [Finding(kind="inputs", where="rollout engine: stop", text=text, nats=0.0)]
    if not evidence.num_past_end:
        return []
    text = (
        f"{evidence.num_past_end} of {len(evidence.samples)} samples go on after a token that ends them: the rollout "
        "engine stops at others than the model folder names"
    )
    return [Finding(kind="inputs", where="rollout engine: stop", text=text, nats=0.0)]


async def _drawn_findings(evidence: Evidence, found: Diagnosis, explain: ExplainDrawn) -> list[Finding]:
    """Ask whether samples are as likely as they should be, where the engine computes what it should."""
    if _has_finding(found, "rollout engine") or not evidence.samples:
        return []
    likelihoods = await explain(evidence.samples[:: max(1, len(evidence.samples) // _ASKED)])
    if not likelihoods:
        return []
    best = max(likelihoods, key=lambda name: likelihoods[name])
    gained_nats = likelihoods[best] - likelihoods[AS_SET]
    if best == AS_SET or gained_nats < _SURE_NATS:
        return []
    text = (
        f"the rollout engine draws from another distribution than the run asks for: {best} makes its samples "
        f"e^{gained_nats:.0f} times as likely"
    )
    return [Finding(kind="inputs", where=f"rollout engine: draws: {best}", text=text, nats=0.0)]
