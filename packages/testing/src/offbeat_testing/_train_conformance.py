"""The promises of the training contract, as tests. Every training engine runs the same ones."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat_core import (
    ConfigError,
    LossTokens,
    Metric,
    Metrics,
    ModelError,
    TrainBackend,
    TrainEngine,
    TrainEngineConfig,
    TrainLayout,
    TrainSequence,
)
from offbeat_testing._models import TinyFamily, reference_logprobs, reference_model, tiny_model


def _sequences(num: int = 6, *, seed: int = 0) -> list[TrainSequence]:
    """Sequences of 5 to 40 tokens; the prompt is a third of each."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 41, num)
    return [
        TrainSequence(
            ids=rng.integers(3, 300, length).astype(np.int32),
            loss_mask=np.arange(length) >= max(1, length // 3),
            extras={"advantage": rng.normal(size=length).astype(np.float32)},
        )
        for length in lengths
    ]


def _nll(tokens: LossTokens[Any]) -> tuple[Any, Metrics]:
    loss = -tokens.logprobs_N.sum() / tokens.total_tokens
    return loss, {"nll": Metric(value=float(loss.detach()), how="sum")}


def _named_nll(tokens: LossTokens[Any]) -> tuple[Any, Metrics]:
    loss, metrics = _nll(tokens)
    return loss, {f"loss/{name}": metric for name, metric in metrics.items()}


def _weighted(tokens: LossTokens[Any]) -> tuple[Any, Metrics]:
    """Return a loss of the shape policy losses have: it reads extras and sequence numbers."""
    per_token = tokens.logprobs_N * tokens.extras["advantage"] * (1 + 0 * tokens.sequence_N)
    return -per_token.sum() / tokens.total_tokens, {}


def _not_finite(tokens: LossTokens[Any]) -> tuple[Any, Metrics]:
    return tokens.logprobs_N.sum() * float("nan"), {}


class TrainEngineConformance:
    """Mix into a test class; say how to make the engine.

    class TestMyEngine(TrainEngineConformance):
        backend = MyEngine

    Attributes:
        backend: what the package registers under `offbeat.engine`.
        family: of the model to train.
        tolerance: of log-probabilities, nats.
    """

    backend: TrainBackend
    family: TinyFamily = "qwen3"
    tolerance: float = 1e-4

    def make_engine(self, config: TrainEngineConfig) -> TrainEngine:
        return self.backend.create(config)

    @pytest.fixture(scope="class")
    @classmethod
    def model_folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tiny_model(tmp_path_factory.mktemp("conformance") / cls.family, cls.family)

    @pytest.fixture
    def config(self, model_folder: Path) -> TrainEngineConfig:
        """Return settings under which one step visibly moves the weights."""
        return TrainEngineConfig(model_path=str(model_folder), device="cpu", learning_rate=1e-3)

    @pytest.fixture
    def engine(self, config: TrainEngineConfig) -> Iterator[TrainEngine]:
        engine = self.make_engine(config)
        yield engine
        engine.close()

    def test_a_plan_says_how_ranks_share_the_model(self, config: TrainEngineConfig) -> None:
        """One rank by itself; several along dp unless options say otherwise. Nothing is started for it."""
        import torch.distributed as dist

        assert self.backend.plan(config) == TrainLayout(zero_stage=self.backend.plan(config).zero_stage)
        assert self.backend.plan(config, 2).num_ranks == self.backend.plan(config, 2).dp == 2
        shared = dataclasses.replace(config, options={"tensor_parallel": 2})
        assert (self.backend.plan(shared, 4).tp, self.backend.plan(shared, 4).dp) == (2, 2)
        assert not dist.is_initialized()

    def test_a_plan_refuses_what_cannot_be(self, config: TrainEngineConfig, tmp_path: Path) -> None:
        """Before anything starts, with the option or setting in the text."""
        for options, num_ranks, said in (
            ({"tensor_paralel": 2}, 2, "did you mean tensor_parallel"),
            ({"tensor_parallel": 0}, 1, "tensor_parallel must be"),
            ({"tensor_parallel": 2}, 3, "got 3"),
            ({"tensor_parallel": 3}, 3, "num_"),  # heads
        ):
            with pytest.raises(ConfigError, match=said):
                self.backend.plan(dataclasses.replace(config, options=options), num_ranks)
        with pytest.raises(ConfigError, match="total_steps"):
            self.backend.plan(dataclasses.replace(config, schedule="cosine"))
        with pytest.raises(ModelError, match="nowhere"):
            self.backend.plan(dataclasses.replace(config, model_path=str(tmp_path / "nowhere")))

    def test_the_engines_own_metrics_have_no_slash(self, engine: TrainEngine) -> None:
        """Check it because a logger distinguishes them by it from the loss function's."""
        found = engine.forward_backward(_sequences(), _named_nll)
        assert {name for name in found if "/" in name} == {"loss/nll"}
        assert {"loss", "num_microbatches"} <= found.keys()
        assert {"grad_norm", "learning_rate", "steps_refused"} <= engine.step().keys()

    def test_logprobs_are_those_of_transformers(self, engine: TrainEngine, config: TrainEngineConfig) -> None:
        """[T] each, equal to the reference under the mask, 0 outside it, in the order given."""
        sequences = _sequences()
        model = reference_model(Path(config.model_path))
        for sequence, logprobs in zip(sequences, engine.logprobs(sequences), strict=True):
            assert logprobs.dtype == np.float32
            expected = np.where(sequence.loss_mask, reference_logprobs(model, sequence.ids), 0.0)
            np.testing.assert_allclose(logprobs, expected, atol=self.tolerance, rtol=0)

    def test_loss_tokens_are_packed_in_order(self, config: TrainEngineConfig) -> None:
        """N loss tokens, sequence numbers sorted, extras beside them, totals over all micro-batches."""
        sequences = _sequences()
        total = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
        seen: list[float] = []

        def look(tokens: LossTokens[Any]) -> tuple[Any, Metrics]:
            numbers = tokens.sequence_N.tolist()
            assert numbers == sorted(numbers)
            assert set(numbers) <= set(range(tokens.num_sequences))
            assert len(numbers) == len(tokens.logprobs_N) == len(tokens.extras["advantage"])
            assert (tokens.total_tokens, tokens.total_sequences) == (total, len(sequences))
            seen.extend(tokens.extras["advantage"].tolist())
            return _nll(tokens)

        engine = self.make_engine(dataclasses.replace(config, max_tokens_per_microbatch=48))
        engine.forward_backward(sequences, look)
        expected = np.concatenate([sequence.extras["advantage"][sequence.loss_mask] for sequence in sequences])
        np.testing.assert_allclose(sorted(seen), sorted(expected.tolist()), rtol=1e-6)
        engine.close()

    def test_micro_batches_change_no_result(self, config: TrainEngineConfig) -> None:
        norms, losses = [], []
        for budget in (8192, 64, 41):
            engine = self.make_engine(dataclasses.replace(config, max_tokens_per_microbatch=budget))
            losses.append(engine.forward_backward(_sequences(), _nll)["nll"].value)
            engine.forward_backward(_sequences(seed=1), _weighted)
            norms.append(engine.step()["grad_norm"].value)
            engine.close()
        np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
        np.testing.assert_allclose(norms, norms[0], rtol=1e-4)

    def test_a_step_that_is_not_finite_is_refused(self, engine: TrainEngine) -> None:
        """Weights stay as they were, the refusal is counted, and the next step works."""
        before = _copy(engine)
        engine.forward_backward(_sequences(), _not_finite)
        assert engine.step()["steps_refused"].value == 1
        assert _same(before, _copy(engine))
        engine.forward_backward(_sequences(), _nll)
        assert np.isfinite(engine.step()["grad_norm"].value)
        assert not _same(before, _copy(engine))
        assert all(np.isfinite(array).all() for array in _copy(engine).values())

    def test_a_step_without_a_token_to_learn_from_moves_nothing(self, config: TrainEngineConfig) -> None:
        """Check that neither momentum nor weight decay moves them; the schedule continues."""
        engine = self.make_engine(dataclasses.replace(config, weight_decay=0.1, warmup_steps=8))
        engine.forward_backward(_sequences(), _nll)
        rates = [engine.step()["learning_rate"].value]
        before = _copy(engine)
        nothing = [dataclasses.replace(each, loss_mask=np.zeros_like(each.loss_mask)) for each in _sequences()]
        engine.forward_backward(nothing, _nll)
        metrics = engine.step()
        assert metrics["steps_refused"].value == 0
        assert _same(before, _copy(engine))
        engine.forward_backward(_sequences(), _nll)
        rates += [metrics["learning_rate"].value, engine.step()["learning_rate"].value]
        assert not _same(before, _copy(engine))
        assert rates[0] < rates[1] < rates[2]
        engine.close()

    def test_steps_learn(self, engine: TrainEngine) -> None:
        losses = []
        for _ in range(5):
            losses.append(engine.forward_backward(_sequences(), _nll)["nll"].value)
            engine.step()
        assert losses[-1] < losses[0]

    def test_weights_come_in_one_order_under_hugging_face_names(
        self, engine: TrainEngine, config: TrainEngineConfig
    ) -> None:
        """Names are those of transformers, each tensor once, equal on every call."""
        first, second = ([name for name, _ in engine.weights()] for _ in range(2))
        assert first == second
        expected = dict(reference_model(Path(config.model_path)).named_parameters())
        assert set(first) == set(expected)
        assert len(first) == len(set(first))
        for name, array in _copy(engine).items():
            np.testing.assert_array_equal(array, expected[name].detach().numpy())

    def test_the_reference_policy_stays(self, engine: TrainEngine) -> None:
        sequences = _sequences()
        first = engine.logprobs(sequences)
        engine.forward_backward(sequences, _nll)
        engine.step()
        kept, moved = engine.logprobs(sequences, reference=True), engine.logprobs(sequences)
        for one, two, three in zip(first, kept, moved, strict=True):
            np.testing.assert_allclose(one, two, atol=1e-6)
            assert not np.allclose(one, three, atol=1e-6)

    def test_save_and_load_continue_the_same_run(
        self, engine: TrainEngine, config: TrainEngineConfig, tmp_path: Path
    ) -> None:
        """A loaded engine takes the step the saved one would take, and transformers reads the folder."""
        engine.forward_backward(_sequences(), _nll)
        engine.step()
        engine.save(tmp_path / "saved")
        saved = _copy(engine)
        other = self.make_engine(config)
        other.load(tmp_path / "saved")
        assert _same(saved, _copy(other))
        for each in (engine, other):
            each.forward_backward(_sequences(seed=2), _nll)
            each.step()
        for name, array in _copy(engine).items():
            np.testing.assert_allclose(array, _copy(other)[name], atol=1e-6, err_msg=name)
        model = reference_model(tmp_path / "saved")
        assert _same(saved, {name: tensor.detach().numpy() for name, tensor in model.named_parameters()})
        other.close()


def _copy(engine: TrainEngine) -> dict[str, Any]:
    return {name: tensor.detach().numpy().copy() for name, tensor in engine.weights()}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
