"""A diagnosis as a sentence, a table, and JSON."""

from typing import Any

from grpo_async_app._diagnosis.causes import Diagnosis

_ROWS = 12
"""Points of the table, around the first that is beyond the band."""


def conclude(found: Diagnosis) -> str:
    """Return the answer as a sentence."""
    if not found.findings:
        return (
            f"no cause found: trainer and rollout engine differ by {found.mismatch:.2g} nats a token, and rounding "
            f"explains {found.rounding:.2g}"
        )
    first = found.findings[0]
    share = f"; {first.nats:.2g} nats a token" if first.nats else ""
    total = f" of {found.mismatch:.2g}" if first.nats and first.kind != "lag" else ""
    return f"{first.text}{share}{total}"


def describe(found: Diagnosis) -> str:
    """Return the whole text: the sentence, other causes, errors by point, and what was not examined."""
    lines = [conclude(found)]
    lines += [f"also: {each.text} ({each.nats:.2g} nats a token)" for each in found.findings[1:]]
    for side, errors in found.layers.items():
        first = next((place for place, each in enumerate(errors) if each.is_beyond), 0)
        shown = errors[max(0, first - 2) : first + _ROWS]
        lines += ["", f"{side}, errors as a share of the values:"]
        lines += [f"  {'point':28}{'error':>10}{'rounding':>10}"]
        lines += [
            f"  {each.point:28}{each.error:10.1e}{each.band:10.1e}{'  <- beyond' if each.is_beyond else ''}"
            for each in shown
        ]
    lines += [f"note: {note}" for note in found.notes]
    return "\n".join(lines)


def to_json(found: Diagnosis) -> dict[str, Any]:
    """Return everything as plain values."""
    return {
        "conclusion": conclude(found),
        "mismatch_nats": found.mismatch,
        "rounding_nats": found.rounding,
        "findings": [
            {"kind": each.kind, "where": each.where, "text": each.text, "nats": each.nats} for each in found.findings
        ],
        "layers": {
            side: [
                {"point": each.point, "error": each.error, "rounding": each.band, "beyond": each.is_beyond}
                for each in errors
            ]
            for side, errors in found.layers.items()
        },
        "notes": found.notes,
    }
