"""Results of a validation: estimates with intervals, lengths, versions; as metrics, and as a table in three forms."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from offbeat_run._validation.estimates import CONFIDENCE, bootstrap_interval, majority_at_k, pass_at_k
from offbeat_run._validation.items import HELD_OUT, ItemAnswers


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over items, with its interval.

    Args:
        value: in [0, 1], but for rewards.
        low, high: ends of the 95 % interval: see `bootstrap_interval`.
        num_items: that it is the mean of.
    """

    value: float
    low: float
    high: float
    num_items: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        if not values:
            return cls(value=0.0, low=0.0, high=0.0, num_items=0)
        low, high = bootstrap_interval(values)
        return cls(value=fmean(values), low=low, high=high, num_items=len(values))


@dataclass(frozen=True, kw_only=True)
class SetSummary:
    """One set in one validation.

    Args:
        name: of the set.
        step: updates done when it began.
        num_items: with at least one sample.
        num_samples: of each item, asked for.
        estimates: such as "avg@8", "pass@8", "maj@8" and "reward", by name. An item with fewer samples than k is not
            part of pass@k and maj@k.
        tokens: mean, median and 95th percentile of the samples' lengths.
        turns: mean of the samples' episodes; 0 without an environment.
        cut_share: of the samples, ended by a limit of tokens or turns.
        versions: samples by the oldest policy version in them.
        mixed_share: of the samples, written by more than one version.
    """

    name: str
    step: int
    num_items: int
    num_samples: int
    estimates: dict[str, Estimate]
    tokens: dict[str, float]
    turns: float
    cut_share: float
    versions: dict[int, int]
    mixed_share: float

    @property
    def reward(self) -> float:
        """Mean over items."""
        return self.estimates["reward"].value

    @property
    def accuracy(self) -> float:
        """avg@n."""
        return self.estimates[f"avg@{self.num_samples}"].value

    def metrics(self) -> dict[str, float]:
        """Return the estimates under names of metrics.jsonl: accuracy for avg@n; pass_at_8, as MLflow takes no `@`."""
        prefix = "eval/" if self.name == HELD_OUT else f"eval/{self.name}/"
        found: dict[str, float] = {}
        for name, estimate in self.estimates.items():
            key = prefix + ("accuracy" if name.startswith("avg@") else name.replace("@", "_at_"))
            found |= {key: estimate.value, f"{key}_low": estimate.low, f"{key}_high": estimate.high}
        found[f"{prefix}response_tokens"] = self.tokens["mean"]
        found[f"{prefix}response_tokens_p95"] = self.tokens["p95"]
        found[f"{prefix}cut_off_share"] = self.cut_share
        if self.turns:
            found[f"{prefix}turns"] = self.turns
        found[f"{prefix}items"] = float(self.num_items)
        found[f"{prefix}versions"] = float(len(self.versions))
        return found


def summarize(
    name: str, step: int, items: Sequence[ItemAnswers], num_samples: int, k: Sequence[int] = ()
) -> SetSummary:
    """Compute everything of one set.

    Args:
        name: of the set.
        step: updates done when the validation began.
        items: with their samples; those without any are left out.
        num_samples: n, asked for of each item.
        k: of pass@k and maj@k, each in [1, n]; n where none is given.
    """
    answered = [item for item in items if item.samples]
    samples = [sample for item in answered for sample in item.samples]
    lengths = np.array([sample.num_tokens for sample in samples] or [0], np.float64)
    estimates = {f"avg@{num_samples}": [item.share_right for item in answered]}
    for each in sorted(set(k) or {num_samples}) if num_samples > 1 else ():  # of one sample all three are avg@1
        whole = [item for item in answered if len(item.samples) >= each]
        estimates[f"pass@{each}"] = [_passed(item, each) for item in whole]
        estimates[f"maj@{each}"] = [_voted(item, each) for item in whole]
    estimates["reward"] = [fmean(sample.reward for sample in item.samples) for item in answered]
    oldest = Counter(min((version for version, _ in sample.versions), default=step) for sample in samples)
    count = max(len(samples), 1)
    return SetSummary(
        name=name,
        step=step,
        num_items=len(answered),
        num_samples=num_samples,
        estimates={key: Estimate.of(values) for key, values in estimates.items()},
        tokens={
            "mean": float(lengths.mean()),
            "median": float(np.median(lengths)),
            "p95": float(np.quantile(lengths, 0.95)),
        },
        turns=sum(sample.num_turns for sample in samples) / count,
        cut_share=sum(sample.stop_reason == "length" for sample in samples) / count,
        versions=dict(sorted(oldest.items())),
        mixed_share=sum(len({version for version, _ in sample.versions}) > 1 for sample in samples) / count,
    )


def _passed(item: ItemAnswers, k: int) -> float:
    return pass_at_k(len(item.samples), sum(sample.right for sample in item.samples), k)


def _voted(item: ItemAnswers, k: int) -> float:
    return majority_at_k([each.vote for each in item.samples], [float(each.right) for each in item.samples], k)


_HEAD = (
    "set",
    "items",
    "n",
    "estimate",
    "value",
    f"{CONFIDENCE:.0%} interval",
    "tokens mean / p95",
    "cut off",
    "version",
)


def table_rows(summaries: Sequence[SetSummary]) -> list[tuple[str, ...]]:
    """Return a head and rows for people: one for each estimate; what belongs to the set stands in its first row."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for summary in summaries:
        versions = ", ".join(map(str, summary.versions)) or "-"
        own = (summary.name, str(summary.num_items), str(summary.num_samples))
        lengths = f"{summary.tokens['mean']:.0f} / {summary.tokens['p95']:.0f}"
        ending = (lengths, f"{summary.cut_share:.1%}", versions)
        for name, estimate in summary.estimates.items():
            interval = f"{estimate.low:.4f} to {estimate.high:.4f}"
            rows.append((*own, name, f"{estimate.value:.4f}", interval, *ending))
            own, ending = ("", "", ""), ("", "", "")
    return rows


def table_text(summaries: Sequence[SetSummary]) -> str:
    """Return the table in columns of plain text."""
    rows = table_rows(summaries)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )


def table_markdown(summaries: Sequence[SetSummary]) -> str:
    """Return the table in Markdown."""
    head, *rows = table_rows(summaries)
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def table_json(summaries: Sequence[SetSummary], **about: Any) -> str:
    """Return the table as JSON, with everything else there is to report about it."""
    interval = f"{CONFIDENCE:.0%}, percentile bootstrap over items"
    return json.dumps({**about, "interval": interval, "sets": [asdict(each) for each in summaries]}, indent=1) + "\n"
