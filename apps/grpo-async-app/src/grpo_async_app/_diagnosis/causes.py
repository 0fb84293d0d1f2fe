"""From evidence to causes: which of inputs, weights, layers, state and lag makes log-probabilities differ."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal

import numpy as np

from grpo_async_app._diagnosis.evidence import (
    Evidence,
    ExaminedSample,
    Occasion,
    PointError,
    by_lag,
    is_beyond_rounding,
    point_errors,
)
from grpo_async_app._diagnosis.readings import (
    KV_FORMAT,
    OUTPUT,
    InspectOther,
    LayerValues,
    best_reading,
    factor,
    with_output,
)
from grpo_async_app._roles.reference import AS_SET, ONE_TOKEN, SOFT_CAP
from offbeat_core import (
    EMBEDDING,
    FINAL_NORM,
    LAYER_POINTS,
    POSITIONS,
    TOKEN_IDS,
    Fingerprint,
    Floats,
    Inspection,
    layer_point,
)

Kind = Literal["inputs", "weights", "layers", "state", "lag"]
Side = Literal["rollout engine", "trainer"]

SIDES: Final[Mapping[Side, str]] = {"trainer": "trained", "rollout engine": "alone"}
"""Log-probabilities that each side computes of a sequence as it is, by their name in `ExaminedSample`."""
_PARTS: Final = {
    "attention input": "the norm before attention",
    "query projection": "the projection of queries",
    "key projection": "the projection of keys",
    "value projection": "the projection of values",
    "query": "positions or the norm of heads, seen in queries",
    "key": "positions or the norm of heads, seen in keys",
    "attention": "attention (mask, scale, window, sinks, gate)",
    "after attention": "the output projection of attention, or the residual stream beside it",
    "mlp input": "the norm before the MLP",
    "experts": "routing of experts",
    "activation": "the activation of the MLP",
    OUTPUT: "the last product of the MLP, or its experts",
}
_ADAPTED: Final = ("projection", "after attention", "activation", OUTPUT)
"""Ends of places that follow a matrix which may have an adapter."""
_TOLD_APART: Final = 4
"""Tokens by which samples are told apart: rounding changes a later one now and then."""
_EXPLAINED: Final = 6
"""Samples that readings of the settings are tried on: each costs dozens of passes."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause.

    Args:
        kind: of the five.
        where: the side and the place.
        text: a sentence.
        nats: mean |difference| of log-probabilities of a token that it explains.
    """

    kind: Kind
    where: str
    text: str
    nats: float


@dataclass(kw_only=True)
class Diagnosis:
    """The outcome: causes, and the errors that a figure shows.

    Args:
        mismatch: mean |trainer's log-probability - the engine's| of a token, nats.
        rounding: mean of what rounding to both formats explains of it.
        findings: causes, the largest first.
        layers: errors by point, for each side that was looked into.
        notes: what could not be examined.
    """

    mismatch: float
    rounding: float
    findings: list[Finding] = field(default_factory=list)
    layers: dict[str, list[PointError]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


Inspect = Callable[[Side, int | None], Awaitable[tuple[Inspection, Inspection, Inspection]]]
"""Asks a side, the reference and the rounded reference about one sample; within a layer from the side's own inputs."""
InspectOtherOf = Callable[[Side, int, float, int], Awaitable[Inspection]]
"""Asks for `InspectOther` of a side and a layer."""
Explain = Callable[[Sequence[ExaminedSample], str], Awaitable[Mapping[str, float]]]
"""Asks the reference which reading of the settings gives log-probabilities that samples hold under a name."""


async def find_causes(
    evidence: Evidence, inspect: Inspect, inspect_other: InspectOtherOf, explain: Explain
) -> Diagnosis:
    """Name the causes.

    Args:
        evidence: that was gathered.
        inspect: asks for values between and within layers.
        inspect_other: asks for those of other positions or layers.
        explain: see `ReferenceRole.sampling_errors`.
    """
    samples = evidence.samples
    sampled, trained = _joined(samples, "sampled"), _joined(samples, "trained")
    found = Diagnosis(
        mismatch=_mean(np.abs(sampled - trained)),
        rounding=_mean(np.hypot(_rounding(samples, "rollout engine"), _rounding(samples, "trainer"))),
    )
    found.findings += _template_findings(evidence)
    wrong_weights = _weight_findings(evidence)
    for side in SIDES:
        if side == "rollout engine" and wrong_weights["trainer"] and not wrong_weights[side]:
            found.notes.append("the rollout engine has its weights from the trainer: its layers were not examined")
            continue
        wrong, is_stale = wrong_weights[side], _are_stale(evidence, wrong_weights[side])
        await _examine_side(side, samples, wrong, is_stale, inspect, inspect_other, explain, found)
    if evidence.has_adapter:
        hint = ", or its adapter (missing, old, of another layer or scale)"
        found.findings = [
            replace(each, text=each.text + hint) if each.kind == "layers" and each.where.endswith(_ADAPTED) else each
            for each in found.findings
        ]
    found.findings += await _state_findings(evidence, explain, found.notes)
    found.findings += _lag_findings(evidence)
    found.findings.sort(key=lambda finding: -finding.nats)
    return found


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0


def _joined(samples: Sequence[ExaminedSample], what: str) -> Floats:
    """[N] of all samples that have it."""
    parts = [getattr(sample, what) for sample in samples if getattr(sample, what) is not None]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _rounding(samples: Sequence[ExaminedSample], side: Side) -> Floats:
    rounded = "rounded_engine" if side == "rollout engine" else "rounded_trainer"
    rounding: Floats = np.abs(_joined(samples, rounded) - _joined(samples, "reference"))
    return rounding


# ── inputs and weights ────────────────────────────────────────────────────────────────────────────────────────────────


def _template_findings(evidence: Evidence) -> list[Finding]:
    if not evidence.template_changes:
        return []
    first = evidence.template_changes[0]
    text = f"{len(evidence.template_changes)} prompts of the run have other tokens when they are rendered now: {first}"
    return [Finding(kind="inputs", where="run: chat template", text=text, nats=0.0)]


def _weight_findings(evidence: Evidence) -> dict[Side, list[str]]:
    """Return for each side the tensors that are not what they should be: the saved ones, and the trainer's."""
    return {
        "trainer": _differing(evidence.trainer_weights, evidence.saved_weights),
        "rollout engine": _differing(evidence.engine_weights, evidence.trainer_weights),
    }


def _are_stale(evidence: Evidence, names: Sequence[str]) -> bool:
    """Return whether the engine holds what it began with under all of these names."""
    held, before = evidence.engine_weights, evidence.earlier_weights
    return all(name in held and name in before and np.array_equal(held[name], before[name]) for name in names)


def _differing(held: Mapping[str, Fingerprint], wanted: Mapping[str, Fingerprint]) -> list[str]:
    return [name for name, marks in held.items() if name in wanted and not np.array_equal(marks, wanted[name])]


# ── layers ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _examine_side(
    side: Side,
    samples: Sequence[ExaminedSample],
    wrong_weights: Sequence[str],
    is_stale: bool,
    inspect: Inspect,
    inspect_other: InspectOtherOf,
    explain: Explain,
    found: Diagnosis,
) -> None:
    """Add what makes a side differ from the reference, if anything does."""
    held = SIDES[side]
    if held == "alone" and any(sample.alone is None for sample in samples):
        found.notes.append(f"the {side} does not say what it computes: what it reported was compared instead")
        held = "sampled"
    values, wanted = _joined(samples, held), _joined(samples, "reference")
    nats = _mean(np.abs(values - wanted))
    if wrong_weights:
        than = "the trainer" if side == "rollout engine" else "the checkpoint's files"
        text = f"the {side} holds other weights than {than}: {', '.join(wrong_weights[:3])}"
        text += f" and {len(wrong_weights) - 3} more" if len(wrong_weights) > 3 else ""
        text += ", as they were before the update" if side == "rollout engine" and is_stale else ""
        found.findings.append(Finding(kind="weights", where=f"{side}: {wrong_weights[0]}", text=text, nats=nats))
        return
    if not is_beyond_rounding(values, wanted, _rounding(samples, side)):
        return
    if side == "trainer" and (finding := _packing_finding(samples, nats)):
        found.findings.append(finding)
        return
    outer = await inspect(side, None)
    finding, layer, errors = _first_outer(side, *outer, nats)
    found.layers[side] = errors
    if finding is None and layer is not None:
        # What a layer itself errs by may be within the band, and beyond it once it has grown in those after it.
        for number in (layer, *range(layer)):
            found_in, wanted_in, rounded_in = (with_output(each, number) for each in await inspect(side, number))
            within = point_errors(found_in, wanted_in, rounded_in, (*LAYER_POINTS, OUTPUT))
            if number == layer or any(each.is_beyond for each in within):
                of_layer = LayerValues(layer=number, found=found_in, wanted=wanted_in, rounded=rounded_in)
                finding = await _first_inner(side, of_layer, within, partial(inspect_other, side, number), nats)
                inner = [replace(each, point=f"layer {number}: {each.point}") for each in within]
                found.layers[side] = [*errors, *inner]
            if any(each.is_beyond for each in within) or OUTPUT not in (each.point for each in within):
                break
    if finding is None and (reading := _best_reading(await explain(samples[:_EXPLAINED], held))):
        is_head = reading.startswith(SOFT_CAP)
        what = "with a head of its own" if is_head else "of other inputs or settings than the run's"
        text = f"the {side} computes log-probabilities {what}: {reading}"
        where = f"{side}: head: {reading}" if is_head else f"{side}: {reading}"
        finding = Finding(kind="layers" if is_head else "inputs", where=where, text=text, nats=nats)
    found.findings.append(finding or _unlocalised(side, errors, nats))


def _packing_finding(samples: Sequence[ExaminedSample], nats: float) -> Finding | None:
    """Return a finding if the trainer is right about single sequences, and not about those that it packs together."""
    single = [sample for sample in samples if sample.trained_alone is not None]
    alone, wanted, packed = (_joined(single, what) for what in ("trained_alone", "reference", "trained"))
    rounding = _rounding(single, "trainer")
    if not single or is_beyond_rounding(alone, wanted, rounding) or not is_beyond_rounding(packed, alone, rounding):
        return None
    text = "the trainer gives sequences that it packs together other log-probabilities than one alone"
    return Finding(kind="state", where="trainer: batch", text=text, nats=nats)


def _unlocalised(side: Side, errors: Sequence[PointError], nats: float) -> Finding:
    if not errors:
        text = f"the {side} differs from transformers by {nats:.3g} nats a token, and does not show its layers"
        return Finding(kind="layers", where=f"{side}: somewhere", text=text, nats=nats)
    text = (
        f"the {side} has the hidden states of transformers and other log-probabilities: the head, its scale or soft "
        "cap, or the temperature"
    )
    return Finding(kind="layers", where=f"{side}: head", text=text, nats=nats)


def _first_outer(
    side: Side, found: Inspection, wanted: Inspection, rounded: Inspection, nats: float
) -> tuple[Finding | None, int | None, list[PointError]]:
    """Return what differs first between layers: a finding, or the number of the layer that makes it."""
    for point, what in ((TOKEN_IDS, "tokens"), (POSITIONS, "positions")):
        if point in found and point in wanted and (where := _first_difference(found[point], wanted[point])) is not None:
            place, got, right = where
            text = f"the {side} computes with other {what}: place {place} has {got:g}, where {right:g} is right"
            return Finding(kind="inputs", where=f"{side}: {what}", text=text, nats=nats), None, []
    num_layers = sum(layer_point(number) in wanted for number in range(len(wanted)))
    points = [EMBEDDING, *(layer_point(number) for number in range(num_layers)), FINAL_NORM]
    errors = point_errors(found, wanted, rounded, points)
    first = next((each.point for each in errors if each.is_beyond), None)
    if first is None:
        return None, None, errors
    absent = [number for number in range(num_layers) if layer_point(number) not in found]
    if absent and first == FINAL_NORM and len(absent) < num_layers:
        text = f"the {side} does not show layer {absent[0]}, and differs behind it: it leaves the layer out"
        return Finding(kind="layers", where=f"{side}: layer {absent[0]}", text=text, nats=nats), None, errors
    if first in (EMBEDDING, FINAL_NORM):
        name = "the embedding" if first == EMBEDDING else "the last norm"
        times = factor(found, wanted, rounded, first)
        text = f"the {side} differs first in {name}" + (f": {times}" if times else "")
        return Finding(kind="layers", where=f"{side}: {first}", text=text, nats=nats), None, errors
    return None, int(first.rpartition(" ")[2]), errors


def _first_difference(found: Floats, wanted: Floats) -> tuple[int, float, float] | None:
    num_tokens = min(len(found), len(wanted))
    width = min(found.shape[1], wanted.shape[1])
    places = np.argwhere(found[:num_tokens, :width] != wanted[:num_tokens, :width])
    if not len(places):
        return None
    row, column = places[0]
    return int(row), float(found[row, column]), float(wanted[row, column])


async def _first_inner(
    side: Side, values: LayerValues, errors: Sequence[PointError], inspect_other: InspectOther, nats: float
) -> Finding:
    """Name the part of a layer that differs first; what no point shows lies after the last one."""
    first = next((each.point for each in errors if each.is_beyond), OUTPUT)
    if errors and errors[-1].point == OUTPUT and not any(each.is_beyond for each in errors):
        text = f"the {side} leaves the band after layer {values.layer}, and no layer so far does so by itself"
        return Finding(kind="layers", where=f"{side}: layer {values.layer}", text=text, nats=nats)
    reading = await best_reading(values, first, inspect_other)
    text = f"the {side} differs first in layer {values.layer}: {_PARTS[first]}"
    if first in ("query", "key") and reading.startswith("positions"):
        text = f"the {side} differs first in layer {values.layer}: {reading}"
    elif reading:
        text += f": {reading}"
    kind: Kind = "state" if reading.startswith(KV_FORMAT) else "layers"
    return Finding(kind=kind, where=f"{side}: layer {values.layer}: {first}", text=text, nats=nats)


# ── state and lag ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def _state_findings(evidence: Evidence, explain: Explain, notes: list[str]) -> list[Finding]:
    """Compare what the engine reported while it sampled with what it computes of the same tokens alone."""
    samples = [sample for sample in evidence.samples if sample.alone is not None]
    if not samples:
        return []
    if not evidence.had_other_weights:
        notes.append("caches were not examined across an update: there is one version of the weights")
    found = _alike_findings(evidence.samples) or _seed_findings(evidence)
    by_occasion: dict[Occasion, list[ExaminedSample]] = {}
    for sample in samples:
        by_occasion.setdefault(sample.occasion, []).append(sample)
    beyond = {occasion for occasion, group in by_occasion.items() if _differs_alone(group)}
    if not beyond:
        return found
    differing = [sample for sample in samples if sample.occasion in beyond]
    errors = np.abs(_joined(differing, "sampled") - _joined(differing, "alone"))
    nats = float(errors.sum()) / max(len(_joined(samples, "sampled")), 1)  # of a token of all samples
    readings = await explain(differing[:_EXPLAINED], "sampled")
    reading = _best_reading(readings)
    if reading and (beyond == {*by_occasion} or reading.startswith(ONE_TOKEN)):
        text = f"the rollout engine reports log-probabilities of other inputs or settings than the run's: {reading}"
        return [*found, Finding(kind="inputs", where=f"rollout engine: {reading}", text=text, nats=nats)]
    what = _describe_state(beyond, {*by_occasion}, differing)
    if evidence.kv_format and what.startswith("decoding"):
        what = f"decoding: the first token is right, and the cache of keys and values is set to {evidence.kv_format}"
    text = f"the rollout engine reports other log-probabilities while it samples than for the same tokens alone: {what}"
    return [*found, Finding(kind="state", where=f"rollout engine: {what.partition(':')[0]}", text=text, nats=nats)]


def _differs_alone(samples: Sequence[ExaminedSample]) -> bool:
    sampled, alone = _joined(samples, "sampled"), _joined(samples, "alone")
    return is_beyond_rounding(sampled, alone, _rounding(samples, "rollout engine"))


def _best_reading(readings: Mapping[str, float]) -> str:
    """Return the reading of the settings that explains what was reported, where the right one does not."""
    right = readings.get(AS_SET, 0.0)
    best = min(readings, key=lambda name: readings[name], default=AS_SET)
    return best if best != AS_SET and readings[best] < 0.1 * right else ""


def _describe_state(beyond: set[Occasion], seen: set[Occasion], samples: Sequence[ExaminedSample]) -> str:
    if beyond == {"before and after the update"}:
        return "cache of another version: only prompts that it had sampled before the update"
    if beyond <= {"before and after the update", "once more", "a later turn"} and beyond != {"a later turn"}:
        return "prefix cache: only prompts that it had computed before"
    if beyond == {"a later turn"}:
        return "turns: only samples that go on after a reply"
    if "alone" not in beyond and "alone" in seen:
        return "batch: only samples that are computed with others"
    errors = [np.abs(each.sampled - each.alone) for each in samples if each.alone is not None]
    first, later = (np.concatenate([each[part] for each in errors]) for part in (slice(1), slice(1, None)))
    if len(later) and first.mean() < 0.1 * later.mean():
        far = [np.flatnonzero(each > 0.1 * later.mean()) for each in errors]
        num_right = max(1, min(int(places[0]) for places in far if len(places)))
        right = "the first token is right" if num_right == 1 else f"the first {num_right} tokens are right"
        return f"decoding: {right} and later ones are not (cached keys and values, or the step's kernel)"
    if len(later) and later.mean() < 0.1 * first.mean():
        return "first token: only the first token of each sample (the end of the pass over its prompt)"
    return (
        "what it reports: all samples, from the first token on (another prompt than was asked for, or something that "
        "is kept from sample to sample)"
    )


def _alike_findings(samples: Sequence[ExaminedSample]) -> list[Finding]:
    """Find samples of one prompt that are the same although they were drawn."""
    seen: dict[bytes, list[bytes]] = {}
    for sample in samples:
        if sample.occasion == "with others" and len(sample.ids) - sample.num_prompt >= 4:
            sampled = sample.ids[sample.num_prompt :].tobytes()
            seen.setdefault(sample.ids[: sample.num_prompt].tobytes(), []).append(sampled)
    several = [drawn for drawn in seen.values() if len(drawn) > 1]
    sure = [abs(float(each.sampled.sum())) < 0.1 for each in samples]  # a model that is sure says the same again
    if not several or any(len(set(drawn)) > 1 for drawn in several) or all(sure):
        return []
    text = "all samples of a prompt are the same: the rollout engine gives each of them the same seed"
    return [Finding(kind="state", where="rollout engine: seeds", text=text, nats=0.0)]


def _seed_findings(evidence: Evidence) -> list[Finding]:
    """Compare completions of one seed, of the same once more, and of another one, prompt by prompt."""
    drawn = [each for each in evidence.seeded if min(map(len, each)) >= _TOLD_APART]
    if len(drawn) < 2:
        return []
    text = ""
    if all(np.array_equal(first[:_TOLD_APART], other[:_TOLD_APART]) for first, _, other in drawn):
        text = "two seeds give the same samples: the rollout engine does not heed the seed of a request"
    elif all(not np.array_equal(first[:_TOLD_APART], again[:_TOLD_APART]) for first, again, _ in drawn):
        text = "one seed gives other samples each time: the rollout engine does not heed the seed of a request"
    return [Finding(kind="state", where="rollout engine: seeds", text=text, nats=0.0)] if text else []


def _lag_findings(evidence: Evidence) -> list[Finding]:
    """Say how much of the mismatch of the run's own samples comes with lag."""
    lagged = by_lag(evidence.lagged)
    if not lagged:
        return []
    fresh = [_mean(each.errors) for each in lagged if not each.lag]
    base = (
        fresh[0]
        if fresh
        else _mean(np.abs(_joined(evidence.samples, "sampled") - _joined(evidence.samples, "trained")))
    )
    parts, most = [], 0.0
    for each in lagged:
        if each.lag:
            nats = _mean(each.errors)
            parts.append(
                f"lag {each.lag}: {nats:.3g} nats a token, {max(nats - base, 0) / max(nats, 1e-12):.0%} of it lag"
            )
            most = max(most, nats - base)
    if most <= max(base, 1e-3):
        return []
    text = f"samples of older weights differ because the policy has moved on ({'; '.join(parts)})"
    return [Finding(kind="lag", where="run: lag", text=text, nats=most)]
