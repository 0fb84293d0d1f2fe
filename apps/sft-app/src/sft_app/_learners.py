"""Learners: from examples as they are, or by preference against the policy that the run began with."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from offbeat_core import Floats, LossFunction, Metric, Metrics, TrainSequence
from offbeat_objectives import PreferenceLoss, kto_baseline, sft_loss
from offbeat_run import RunFolder, counted_loss, so_far
from sft_app._examples import Example, with_extras
from sft_app._preflight import Preflight
from sft_app._ranks import RanksEngine
from sft_app._reference import Engine, IsAskedToEnd, Reference, compute_reference, load_reference, save_reference


class Learner(Protocol):
    """Learns from the examples of an update, and says how well it does on those held out."""

    def prepare(self, is_asked_to_end: IsAskedToEnd) -> None:
        """Make what the first update needs, or find it in the run folder. KeyboardInterrupt: asked to end."""

    def learn(self, indices: Sequence[int]) -> tuple[Metric, Metrics]:
        """Add up the gradient of an update on those examples: the loss that a log shows, and what else to log."""

    def validate(self) -> dict[str, float]:
        """`loss` on the held-out examples, and the metrics of the loss there."""


class SupervisedLearner:
    """Learns what the assistant said."""

    def __init__(self, preflight: Preflight, engine: Engine) -> None:
        self._preflight, self._engine = preflight, engine

    def prepare(self, is_asked_to_end: IsAskedToEnd) -> None:
        """There is nothing to prepare."""

    def learn(self, indices: Sequence[int]) -> tuple[Metric, Metrics]:
        train = self._preflight.examples.train
        metrics = train_on(self._engine, [each for i in indices for each in train[i].sequences], sft_loss)
        return metrics["loss/nll"], {name: value for name, value in metrics.items() if "/" not in name}

    def validate(self) -> dict[str, float]:
        """Mean cross entropy over all loss tokens, nats."""
        sequences = [sequence for example in self._preflight.held_out for sequence in example.sequences]
        found = self._engine.logprobs(sequences)
        total = sum(float(-one[each.loss_mask].sum()) for one, each in zip(found, sequences, strict=True))
        return {"loss": total / max(sum(int(each.loss_mask.sum()) for each in sequences), 1)}


class PreferenceLearner:
    """Learns from pairs or rated answers.

    Args:
        preflight: of the run.
        engine: before the first update, or as a checkpoint of update `start` has left it.
        run: keeps the reference's log-probabilities.
        start: updates done.
        reference: what the policy before training says; None to compute it.
    """

    def __init__(
        self, preflight: Preflight, engine: Engine, run: RunFolder, start: int, reference: Reference | None
    ) -> None:
        self._preflight, self._engine, self._run, self._start = preflight, engine, run, start
        self._config = preflight.config.preference
        self._loss = PreferenceLoss(self._config)
        self._reference = reference

    def prepare(self, is_asked_to_end: IsAskedToEnd) -> None:
        """The log-probabilities of the policy before training: those of the engine, as long as it has not begun."""
        if not self._config.needs_reference or self._reference is not None:
            return
        self._reference = load_reference(self._run.path, self._preflight)
        if self._reference is None:
            self._reference = compute_reference(
                self._preflight, self._engine, has_begun=self._start > 0, is_asked_to_end=is_asked_to_end
            )
            save_reference(self._run.path, self._preflight, self._reference)

    def learn(self, indices: Sequence[int]) -> tuple[Metric, Metrics]:
        examples = [self._preflight.examples.train[index] for index in indices]
        reference = None if self._reference is None else [self._reference.train[index] for index in indices]
        metrics = train_on(self._engine, self._place(examples, reference), self._loss)
        return metrics["loss/total"], with_margins(metrics)

    def validate(self) -> dict[str, float]:
        reference = None if self._reference is None else self._reference.held_out
        sequences = self._place(self._preflight.held_out, reference)
        metrics = self._loss.measure(sequences, self._engine.logprobs(sequences))
        shown = {name: metric.value for name, metric in with_margins(metrics).items() if not name.startswith("loss/")}
        return {"loss": metrics["loss/total"].value, **shown}

    def _place(
        self, examples: Sequence[Example], reference: Sequence[tuple[Floats, ...]] | None
    ) -> list[TrainSequence]:
        """Return the sequences of one update, with what its loss reads beside them: see `PreferenceLoss`."""
        shared = {"baseline": self._baseline(examples, reference)} if self._config.loss == "kto" else {}
        num_chosen_tokens = sum(int(example.sequences[0].loss_mask.sum()) for example in examples)
        placed = []
        for number, example in enumerate(examples):
            is_pair = len(example.sequences) > 1
            for at, sequence in enumerate(example.sequences):
                extras: dict[str, float | Floats] = {**shared}
                if is_pair:
                    extras["pair"] = float(number)
                if self._config.loss == "orpo":
                    extras["likelihood"] = 0.0 if at else 1 / num_chosen_tokens
                if reference is not None:
                    extras["reference"] = spread(sequence, reference[number][at])
                placed.append(replace(with_extras(sequence, **extras), group=number if is_pair else -1))
        return placed

    def _baseline(self, examples: Sequence[Example], reference: Sequence[tuple[Floats, ...]] | None) -> float:
        """KTO's z₀ under the policy of now."""
        assert reference is not None
        mismatched = [example.mismatched for example in examples if example.mismatched is not None]
        found = self._engine.logprobs(mismatched)
        own = [float(one[each.loss_mask].sum(dtype=np.float64)) for one, each in zip(found, mismatched, strict=True)]
        return kto_baseline(own, [float(kept[-1].sum(dtype=np.float64)) for kept in reference])


def train_on(engine: Engine, sequences: Sequence[TrainSequence], loss: LossFunction) -> Metrics:
    """Add up the gradient of a loss, and say how far that is; ranks say it themselves."""
    return engine.forward_backward(sequences, loss if isinstance(engine, RanksEngine) else counted_loss(loss, so_far))


def with_margins(metrics: Metrics) -> Metrics:
    """Also the margin of rated answers, whose good and bad ones no loss sees side by side."""
    chosen, rejected = metrics.get("rewards/chosen"), metrics.get("rewards/rejected")
    if "rewards/margins" in metrics or chosen is None or rejected is None:
        return metrics
    return {**metrics, "rewards/margins": Metric(value=chosen.value - rejected.value)}


def spread(sequence: TrainSequence, values: Floats) -> Floats:
    """[T]: values of the loss tokens where they stand, 0 elsewhere."""
    spread_T = np.zeros(len(sequence.ids), np.float32)
    spread_T[sequence.loss_mask] = values
    return spread_T


def create_learner(
    preflight: Preflight, engine: Engine, run: RunFolder, start: int = 0, *, reference: Reference | None = None
) -> Learner:
    """Return what the section `preference` asks for; arguments as those of `PreferenceLearner`."""
    if preflight.config.preference.loss == "sft":
        return SupervisedLearner(preflight, engine)
    return PreferenceLearner(preflight, engine, run, start, reference)
