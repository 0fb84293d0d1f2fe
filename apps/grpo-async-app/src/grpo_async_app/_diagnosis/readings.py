"""Readings of one layer: which change of what is right gives the values that a side computes.

Shapes: T tokens, H query heads, K key heads, D of a head.
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from grpo_async_app._diagnosis.evidence import PointError, point_errors
from offbeat_core import Floats, Inspection, layer_point

InspectOther = Callable[[float, int], Awaitable[Inspection]]
"""Asks the reference about a layer by its number, with the inputs that the side gave to the layer in question, and with
positions times a number."""
_POSITION_SCALES: Final = (2.0, 4.0, 8.0, 0.5, 0.25, 0.0)
"""Factors that may explain other queries: context extended or not, positions left out."""
_NEIGHBOURS: Final = (1, -1, 2, -2)
"""Layers before and behind, whose weights a side may have taken."""
_HEAD_WIDTHS: Final = (8, 16, 32, 64, 80, 96, 128, 160, 192, 256)
_WINDOWS: Final = tuple(2**power + more for power in range(2, 8) for more in (-1, 0, 1))
_LARGEST_SCALE: Final = 16.0
_FORMATS: Final = {"8 bits (e4m3)": torch.float8_e4m3fn, "8 bits (e5m2)": torch.float8_e5m2, "bfloat16": torch.bfloat16}
OUTPUT: Final = "output"
"""Point that is computed here: what the MLP adds."""
KV_FORMAT: Final = "keys and values rounded to"


@dataclass(frozen=True, kw_only=True)
class LayerValues:
    """Values within one layer, all computed from the inputs that the side gave to it.

    Args:
        layer: number.
        found: by the side.
        wanted: by the reference.
        rounded: by the reference in the side's format.
    """

    layer: int
    found: Inspection
    wanted: Inspection
    rounded: Inspection

    def is_explained(self, point: str, values: Inspection) -> bool:
        """Return whether a point is within its band of other values."""
        if point not in values or not _are_comparable(self.found, self.wanted, self.rounded, point):
            return False
        # Rounding shifts these as far as it does the right ones.
        num_tokens = min(len(values[point]), len(self.wanted[point]))
        here, wanted, band = (each[point][:num_tokens] for each in (values, self.wanted, self.rounded))
        rounded = {point: here + (band - wanted)}
        errors = point_errors(self.found, values, rounded, [point])
        return bool(errors) and not errors[0].is_beyond


async def best_reading(values: LayerValues, point: str, inspect_other: InspectOther) -> str:
    """Return which change explains the values of the first point that differs; "" where none does."""
    for scale in _POSITION_SCALES if point in ("query", "key") else ():
        if values.is_explained(point, await inspect_other(scale, values.layer)):
            return f"positions scaled by {scale:g}"
    if point == "experts":
        return _choice_of_experts(values)
    if point == OUTPUT and "experts" in values.found and (reading := _sum_of_experts(values)):
        return reading
    if times := factor(values.found, values.wanted, values.rounded, point):
        return times
    if point == "attention" and (reading := _attention_reading(values)):
        return reading
    for distance in _NEIGHBOURS if point in ("attention input", "query projection", "key projection") else ():
        if values.is_explained(point, await inspect_other(1.0, values.layer + distance)):
            return f"the weights of layer {values.layer + distance}"
    return ""


def with_output(given: Inspection, layer: int) -> Inspection:
    """Add what the MLP, or its experts, put onto the residual stream, where both ends are there."""
    end, start = given.get(layer_point(layer)), given.get("after attention")
    return given if end is None or start is None or end.shape != start.shape else {**given, OUTPUT: end - start}


def _choice_of_experts(values: LayerValues) -> str:
    """Return how many experts tokens take, where it is another number, or which one none of them takes."""
    here, there = values.found["experts"], values.wanted["experts"]
    if here.shape[1] != there.shape[1]:
        return f"{here.shape[1]} a token in place of {there.shape[1]}"
    there = there[: len(here)]
    never = np.setdiff1d(there, here)
    if not len(never) or ((here != there).any(-1) != np.isin(there, never).any(-1)).any():
        return ""
    return f"never {', '.join(f'{expert:g}' for expert in never)}"


def _sum_of_experts(values: LayerValues) -> str:
    """Return whether each token has a multiple of the right output of its experts."""
    if not _are_comparable(values.found, values.wanted, values.rounded, OUTPUT):
        return ""
    here = values.found[OUTPUT]
    there = values.wanted[OUTPUT][: len(here)]
    times = (here * there).sum(-1, keepdims=True) / np.maximum(np.square(there).sum(-1, keepdims=True), 1e-30)
    rounded = times * values.rounded[OUTPUT][: len(here)]
    errors = point_errors({OUTPUT: here}, {OUTPUT: times * there}, {OUTPUT: rounded}, [OUTPUT])
    if errors[0].is_beyond or np.ptp(times) < 1e-2:
        return ""
    return "the right experts, whose weights add up to another sum"


def factor(found: Inspection, wanted: Inspection, rounded: Inspection, point: str) -> str:
    """Return by what number the values of a point are too large, where they are right but for that."""
    if point == "experts" or not _are_comparable(found, wanted, rounded, point):
        return ""
    num_tokens = len(found[point])
    here, there = found[point], wanted[point][:num_tokens]
    times = float((here * there).sum() / max(float((there * there).sum()), 1e-30))
    if abs(times - 1) < 1e-2:
        return ""
    errors = point_errors({point: here}, {point: times * there}, {point: times * rounded[point]}, [point])
    return "" if errors[0].is_beyond else f"{times:.3g} times the right values"


def _are_comparable(found: Inspection, wanted: Inspection, rounded: Inspection, point: str) -> bool:
    given = [each[point] for each in (found, wanted, rounded) if point in each]
    return len(given) == 3 and len({each.shape[1] for each in given}) == 1 and len(given[0]) <= len(given[1])


def _attention_reading(values: LayerValues) -> str:
    """Return which attention over the side's own queries, keys and values gives what it computes."""
    needed = "query", "key", "value projection", "attention"
    if not all(_are_comparable(values.found, values.wanted, values.rounded, point) for point in needed):
        return ""
    head_dim = next((width for width in _HEAD_WIDTHS if _is_plain(values.wanted, width)), 0)
    if not head_dim:  # it has a gate, sinks, a window or a scale of its own
        return ""
    best, name = 1.0, ""
    band = PointError(point="attention", error=0.0, band=_error(values.rounded, values.wanted))
    for reading, mixed in _attentions(values.found, head_dim):
        error = _error({"attention": mixed}, values.found)
        if error < best and not PointError(point="attention", error=error, band=band.band).is_beyond:
            best, name = error, reading
    return name


def _is_plain(right: Inspection, head_dim: int) -> bool:
    """Return whether attention with heads of this width gives the reference's values."""
    query, key, mixed = (right[point].shape[1] for point in ("query", "key", "attention"))
    if query % head_dim or key % head_dim or mixed != query or query % key:
        return False
    return _error({"attention": _attend(right, head_dim)}, right) < 1e-3


def _error(found: Inspection, wanted: Inspection) -> float:
    return point_errors(found, wanted, wanted, ["attention"])[0].error


def _attentions(given: Inspection, head_dim: int) -> Iterator[tuple[str, Floats]]:
    """Yield attention of a side's own queries, keys and values, by the change that was made to it."""
    for name, dtype in _FORMATS.items():
        coarse = {
            point: torch.from_numpy(np.ascontiguousarray(given[point])).to(dtype).float().numpy()
            for point in ("key", "value projection")
        }
        yield f"{KV_FORMAT} {name}", _attend({**given, **coarse}, head_dim)
    yield "tokens see those behind them", _attend(given, head_dim, sees_ahead=True)
    for window in _WINDOWS:
        if window < len(given["query"]):
            yield f"a window of {window} tokens", _attend(given, head_dim, window=window)
    yield "key heads in turn, and not each for its neighbours", _attend(given, head_dim, in_turn=True)
    yield "a sink of logit 0", _attend(given, head_dim, has_sink=True)
    scale = _best_scale(given, head_dim)
    yield f"scores scaled by {scale:.3g}", _attend(given, head_dim, scale=scale)


def _best_scale(given: Inspection, head_dim: int) -> float:
    """Return the factor of scores by which attention comes nearest: the best of a grid, and of finer ones around it."""
    best, step = 1.0, _LARGEST_SCALE ** (1 / 8)
    for _ in range(6):
        scales = [best * step**power for power in range(-8, 9)]
        best = min(scales, key=lambda scale: _error({"attention": _attend(given, head_dim, scale=scale)}, given))
        step **= 1 / 6
    return best


def _attend(
    given: Inspection,
    head_dim: int,
    *,
    scale: float = 1.0,
    window: int | None = None,
    sees_ahead: bool = False,
    in_turn: bool = False,
    has_sink: bool = False,
) -> Floats:
    """[T, H * D] of queries [T, H * D], keys and values [T, K * D]."""
    q_HTD, k_KTD, v_KTD = (
        torch.unflatten(torch.from_numpy(np.ascontiguousarray(given[point])), 1, (-1, head_dim)).transpose(0, 1)
        for point in ("query", "key", "value projection")
    )
    shared = len(q_HTD) // len(k_KTD)
    k_HTD, v_HTD = (x.repeat(shared, 1, 1) if in_turn else x.repeat_interleave(shared, 0) for x in (k_KTD, v_KTD))
    scores = q_HTD @ k_HTD.transpose(1, 2) * (scale * head_dim**-0.5)
    places = torch.arange(scores.shape[-1])
    distance = places[:, None] - places
    hidden = (distance < 0) & (not sees_ahead) | (distance >= (window or len(places)))
    scores = scores.masked_fill(hidden, -torch.inf)
    if has_sink:
        scores = torch.cat([scores, torch.zeros_like(scores[..., :1])], -1)
        v_HTD = torch.cat([v_HTD, torch.zeros_like(v_HTD[:, :1])], 1)
    mixed: Floats = (scores.softmax(-1) @ v_HTD).transpose(0, 1).flatten(1).numpy()
    return mixed
