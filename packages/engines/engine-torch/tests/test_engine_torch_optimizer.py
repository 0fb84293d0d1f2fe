import dataclasses
import logging

import numpy as np
import pytest
import torch

from offbeat_core import ConfigError, TrainEngineConfig, learning_rate_at
from offbeat_engine_torch import TorchTrainEngine


def config(folder="unused", **changes):
    return TrainEngineConfig(model_path=str(folder), device="cpu", learning_rate=1e-3, **changes)


def copy_moments(engine):
    optimizer = engine._optimizer
    states = {name: optimizer.state_of(name) for name in optimizer.parameters}
    return {(name, key): tensor.clone() for name, state in states.items() for key, tensor in state.items()}


def test_schedules_pass_through_known_values():
    linear = config(schedule="linear", warmup_steps=4, total_steps=14, min_learning_rate_ratio=0.1)
    rates = [learning_rate_at(step, linear) / 1e-3 for step in (0, 3, 4, 9, 14, 20)]
    assert rates == pytest.approx([0.2, 0.8, 1.0, 0.55, 0.1, 0.1])
    cosine = dataclasses.replace(linear, schedule="cosine", min_learning_rate_ratio=0.0)
    rates = [learning_rate_at(step, cosine) / 1e-3 for step in (4, 9, 14)]
    assert rates == pytest.approx([1.0, 0.5, 0.0])
    assert learning_rate_at(10**6, config()) == 1e-3


@pytest.mark.parametrize("changes", [{"total_steps": 0}, {"total_steps": 5, "warmup_steps": 5}])
def test_a_schedule_without_an_end_is_refused(model_folder, changes):
    with pytest.raises(ConfigError, match="total_steps"):
        TorchTrainEngine.create(config(model_folder, schedule="cosine", **changes))


def test_adamw_is_that_of_the_paper(model_folder, make_groups, weighted_loss):
    """Two clipped steps by hand in float64; decay touches matrices only."""
    settings = config(model_folder, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=1)
    engine = TorchTrainEngine.create(settings)
    weights = {name: tensor.double().clone() for name, tensor in engine.weights()}
    first = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    second = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    for step in (1, 2):
        engine.forward_backward(make_groups(seed=step), weighted_loss)
        grads = {name: p.grad.double().clone() for name, p in engine._optimizer.parameters.items()}
        norm = torch.sqrt(sum((grad**2).sum() for grad in grads.values()))
        metrics = engine.step()
        assert metrics["grad_norm"].value == pytest.approx(float(norm), rel=1e-5)
        rate = 1e-3 * (0.5 if step == 1 else 1.0)
        assert metrics["learning_rate"].value == pytest.approx(rate)
        for name, weight in weights.items():
            grad = grads[name] * min(1.0, 0.5 / float(norm))
            first[name].mul_(0.9).add_(grad, alpha=0.1)
            second[name].mul_(0.95).add_(grad**2, alpha=0.05)
            weight.mul_(1 - rate * (0.1 if weight.ndim >= 2 else 0.0))
            corrected = second[name] / (1 - 0.95**step)
            weight.sub_(rate * (first[name] / (1 - 0.9**step)) / (corrected.sqrt() + 1e-8))
    for name, tensor in engine.weights():
        torch.testing.assert_close(tensor.double(), weights[name], rtol=1e-4, atol=1e-6)


def test_a_gradient_that_is_not_finite_is_refused_and_named(model_folder, make_groups, weighted_loss, caplog):
    engine = TorchTrainEngine.create(config(model_folder, weight_decay=0.1))
    engine.forward_backward(make_groups(), weighted_loss)
    engine.step()
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    moments = copy_moments(engine)

    def poison(tokens):  # finite loss, infinite slope
        return torch.sqrt(tokens.logprobs_N * 0.0).sum(), {}

    metrics = engine.forward_backward(make_groups(), poison)
    assert np.isfinite(metrics["loss"].value)
    with caplog.at_level(logging.WARNING):
        metrics = engine.step()
    assert metrics["steps_refused"].value == 1
    assert metrics["grad_norm"].weight == 0
    assert (engine.steps_taken, engine.steps_refused) == (1, 1)
    assert "model.embed_tokens.weight" in engine.last_refusal
    assert engine.last_refusal in caplog.text
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.weights())
    assert moments
    assert all(torch.equal(moments[name], tensor) for name, tensor in copy_moments(engine).items())
    engine.forward_backward(make_groups(), weighted_loss)
    assert engine.step()["steps_refused"].value == 0


def test_a_loss_that_is_not_finite_in_one_micro_batch_refuses_the_step(model_folder, make_groups, weighted_loss):
    engine = TorchTrainEngine.create(config(model_folder, max_tokens_per_microbatch=24))
    calls = []

    def sometimes(tokens):
        calls.append(1)
        value, metrics = weighted_loss(tokens)
        return value * (float("nan") if len(calls) == 2 else 1.0), metrics

    engine.forward_backward(make_groups(), sometimes)
    assert len(calls) > 2
    assert engine.step()["steps_refused"].value == 1
    assert "the loss is not finite" in engine.last_refusal
    engine.forward_backward(make_groups(), weighted_loss)
    assert engine.step()["steps_refused"].value == 0, "a bad loss is of its own update alone"


def test_sequences_without_loss_tokens_change_nothing(model_folder, make_groups, weighted_loss):
    engine = TorchTrainEngine.create(config(model_folder))
    silent = [dataclasses.replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in make_groups()]
    assert engine.forward_backward(silent, weighted_loss) == {}
    assert engine.step()["grad_norm"].value == 0.0
    assert all(not found.any() for found in engine.logprobs(silent))
