"""Mismatch of the trainer's log-probabilities and those that the rollout engine reported, whatever is corrected.

With r = π_train / π_rollout of each loss token, which the rollout policy sampled:

    kl            Σ (r - 1 - log r) / N, the estimator k3 of KL(rollout ‖ train), nats per token
    abs_p99_nats  the least value that |log r| of 99 in 100 tokens does not exceed
    abs_max_nats  max |log r|
    ess_share     (Σ r)² / (N Σ r²), the effective sample size as a share of N: 1 for equal policies

Where the rollout engine has said which experts of a mixture each token took, the same figures are made of the tokens
whose predecessor, which predicts them, the trainer's routers would have sent through the same experts in all layers,
and of the others.

log r is cut at ±20 before exp; |log r| is not cut. A micro-batch yields sums and counts, which add up over
micro-batches, ranks and mini batches, so that the figures are those of the whole update however it is divided. The
percentile comes from counts in bins that are 32 to a decade, from 1e-6 to 1000 nats: it is the upper edge of its bin,
at least the exact value and at most 7.5 % above it (1e-6 at the low end), and never above the maximum.

Sources: k3: J. Schulman, http://joschu.net/blog/kl-approx.html; effective sample size: A. Kong, 1992, "A note on
importance sampling using standardized weights".
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat_core import DeferredMetrics, Metric, Metrics
from offbeat_objectives._config.algorithm import LOG_RATIO_BOUND

SUMS_PREFIX: Final = "mismatch_sums/"
LAG0: Final = "lag0"
"""Tokens that the trainer scored with exactly the weights that sampled them."""
LAGGED: Final = "lagged"
_UNKNOWN: Final = "unknown"
SAME_ROUTES: Final = "same_routes"
OTHER_ROUTES: Final = "other_routes"
_ROUTES: Final = f"{SUMS_PREFIX}routes/"
_BINS_PER_DECADE: Final = 32
_EDGES: Final = 10.0 ** (np.arange(9 * _BINS_PER_DECADE + 1) / _BINS_PER_DECADE - 6)
"""Upper edges of the bins, nats. The first bin begins at 0; one more takes what is above the last edge."""

_Doubles = npt.NDArray[np.float64]


@torch.no_grad()
def measure_mismatch(
    train_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    lagged_N: Tensor | None = None,
    routes_differ_N: Tensor | None = None,
) -> DeferredMetrics:
    """Sum up the mismatch of one micro-batch's tokens.

    Args:
        train_logprobs_N: [N] nats, of the trainer's policy.
        rollout_logprobs_N: [N] nats, as the rollout engine reported them.
        lagged_N: [N] 0 where the trainer's number is of exactly the weights that sampled the token, else 1; None where
            that is not known.
        routes_differ_N: [N] share of layers in which the token that predicts would have taken other experts than in the
            rollout engine; below 0 where that is not known. None where the model has no experts, or engines do not say.

    Returns:
        Sums, counts and maxima under `mismatch_sums/`, for `summarise_mismatch` once all of them are merged.
    """
    log_ratio_N = train_logprobs_N.float() - rollout_logprobs_N.float()
    # float64 sums on the host are exact enough on every device, also those without float64.
    flags = [each.float() for each in (lagged_N, routes_differ_N) if each is not None]

    def make(values: Sequence[_Doubles]) -> Metrics:
        log_ratio, *rest = values
        routed = {} if routes_differ_N is None else _routed_sums(log_ratio, rest[-1])
        if lagged_N is None:
            return _sums(_UNKNOWN, log_ratio) | routed
        return _sums(LAG0, log_ratio[rest[0] == 0]) | _sums(LAGGED, log_ratio[rest[0] != 0]) | routed

    return DeferredMetrics([log_ratio_N, *flags], make)


def _routed_sums(log_ratio_n: _Doubles, differ_n: _Doubles) -> Metrics:
    known_n = differ_n[differ_n >= 0]
    counts = {"tokens": float(len(known_n)), "differing": float(known_n.sum())}
    found = _sums(SAME_ROUTES, log_ratio_n[differ_n == 0]) | _sums(OTHER_ROUTES, log_ratio_n[differ_n > 0])
    return found | {f"{_ROUTES}{name}": Metric(value=value, how="sum") for name, value in counts.items()}


def _sums(tokens: str, log_ratio_n: _Doubles) -> Metrics:
    if not len(log_ratio_n):
        return {}
    # A log-probability that is not a number is as far away as can be.
    log_ratio_n = np.where(np.isnan(log_ratio_n), -np.inf, log_ratio_n)
    sizes_n = np.abs(log_ratio_n)
    bounded_n = np.clip(log_ratio_n, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_n = np.exp(bounded_n)
    sums = {
        "tokens": float(len(log_ratio_n)),
        "kl": float(np.sum(np.expm1(bounded_n) - bounded_n)),
        "ratio": float(np.sum(ratio_n)),
        "ratio_square": float(np.sum(np.square(ratio_n))),
    }
    bins, counts = np.unique(np.searchsorted(_EDGES, sizes_n), return_counts=True)
    sums |= {f"bin_{number}": float(count) for number, count in zip(bins.tolist(), counts.tolist(), strict=True)}
    found = {name: Metric(value=value, how="sum") for name, value in sums.items()}
    found["abs_max"] = Metric(value=float(sizes_n.max()), how="max")
    return {f"{SUMS_PREFIX}{tokens}/{name}": metric for name, metric in found.items()}


def summarise_mismatch(metrics: Mapping[str, Metric]) -> Metrics:
    """Turn the merged sums of `measure_mismatch` into the figures of an update.

    Args:
        metrics: of a whole update; others than those of `measure_mismatch` are returned as they are.

    Returns:
        For all tokens `mismatch/kl`, `mismatch/abs_p99_nats`, `mismatch/abs_max_nats` and `mismatch/ess_share`; where
        lags are known the same with `_lag0` and `_lagged` at the end, for those of the two that have tokens, and
        `mismatch/lagged_share`, the share of the tokens that are lagged.

        Where routes are known, the same with `_same_routes` and `_other_routes` at the end, and
        `mismatch/routes_differ`, the share of layers, over all tokens, in which the trainer would have taken others.
    """
    others = {name: metric for name, metric in metrics.items() if not name.startswith(SUMS_PREFIX)}
    parts = {tokens: _part(metrics, f"{SUMS_PREFIX}{tokens}/") for tokens in (LAG0, LAGGED, _UNKNOWN)}
    parts = {tokens: part for tokens, part in parts.items() if part}
    figures = dict(_figures(_add_up(list(parts.values())), "")) if parts else {}
    for tokens in (LAG0, LAGGED):
        if tokens in parts:
            figures |= _figures(parts[tokens], f"_{tokens}")
    for tokens in (SAME_ROUTES, OTHER_ROUTES):
        if part := _part(metrics, f"{SUMS_PREFIX}{tokens}/"):
            figures |= _figures(part, f"_{tokens}")
    if (routes := _part(metrics, _ROUTES)) and routes["tokens"]:
        figures["mismatch/routes_differ"] = routes["differing"] / routes["tokens"]
    if parts and _UNKNOWN not in parts:
        counts = {tokens: part["tokens"] for tokens, part in parts.items()}
        figures["mismatch/lagged_share"] = counts.get(LAGGED, 0.0) / sum(counts.values())
    return {**others, **{name: Metric(value=value) for name, value in figures.items()}}


def _part(metrics: Mapping[str, Metric], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): each.value for name, each in metrics.items() if name.startswith(prefix)}


def _add_up(parts: list[dict[str, float]]) -> dict[str, float]:
    names = {name for part in parts for name in part} - {"abs_max"}
    total = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
    return {**total, "abs_max": max(part["abs_max"] for part in parts)}


def _figures(sums: Mapping[str, float], suffix: str) -> Iterator[tuple[str, float]]:
    num_tokens = sums["tokens"]
    yield f"mismatch/kl{suffix}", sums["kl"] / num_tokens
    yield f"mismatch/abs_p99_nats{suffix}", min(_percentile_99(sums), sums["abs_max"])
    yield f"mismatch/abs_max_nats{suffix}", sums["abs_max"]
    yield f"mismatch/ess_share{suffix}", sums["ratio"] ** 2 / (num_tokens * sums["ratio_square"])


def _percentile_99(sums: Mapping[str, float]) -> float:
    """Upper edge of the bin that holds the token of rank ⌈0.99 N⌉; infinity above the last edge."""
    counts = {int(name.removeprefix("bin_")): count for name, count in sums.items() if name.startswith("bin_")}
    left = -(-99 * int(sums["tokens"]) // 100)
    for number in sorted(counts):
        left -= int(counts[number])
        if left <= 0:
            return float(_EDGES[number]) if number < len(_EDGES) else float("inf")
    raise AssertionError("the counts of the bins add up to the tokens")
