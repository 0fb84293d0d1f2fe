"""Steps of an update: what the loss is called with, what is clipped, what is updated, and what is refused."""

import logging
import math

import numpy as np
import pytest
import torch
from torch import nn

from offbeat_core import (
    DeferredMetrics,
    Metric,
    OffbeatError,
    ShapeError,
    TrainEngineConfig,
    TrainSequence,
    learning_rate_at,
)
from offbeat_training import (
    ClippedAdamW,
    LossCalls,
    Steps,
    answers_of_all,
    clip_gradients,
    lay_out,
    plan_packs,
    plan_shares,
    with_loss_tokens,
)


def config_of(**changes):
    return TrainEngineConfig(model_path="unused", learning_rate=1e-2, **changes)


def make_parameters(seed=0):
    """A matrix, which weights decay of, and a vector, which they do not."""
    draw = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in (("a", (3, 4)), ("b", (4,)))}


def differentiate(parameters, seed):
    """Put the same gradients into whichever parameters."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=draw)


def test_a_norm_above_the_limit_becomes_the_limit_and_a_smaller_one_stays():
    for limit, wanted in ((1.0, [0.6, 0.8]), (5.0, [3.0, 4.0]), (9.0, [3.0, 4.0]), (0.0, [3.0, 4.0])):
        gradients = [torch.tensor([3.0]), torch.tensor([4.0])]
        clip_gradients(gradients, 5.0, limit)
        assert [float(each) for each in gradients] == pytest.approx(wanted), limit
    clip_gradients([], 5.0, 1.0)  # of a rank that has none


def test_a_step_is_that_of_adamw_under_the_schedule_with_the_gradient_clipped():
    """By hand in float64; weights of matrices alone decay, and the first step has the first rate of the warm-up."""
    config = config_of(weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2)
    parameters = make_parameters()
    optimizer = ClippedAdamW(parameters, config)
    weights = {name: each.detach().double().clone() for name, each in parameters.items()}
    first, second = ({name: torch.zeros_like(each) for name, each in weights.items()} for _ in range(2))
    for step in range(3):
        differentiate(parameters, step)
        norm = math.sqrt(sum(float((each.grad.double() ** 2).sum()) for each in parameters.values()))
        gradients = {name: each.grad.double() * min(1.0, 0.5 / norm) for name, each in parameters.items()}
        rate = learning_rate_at(step, config)
        assert optimizer.learning_rate == rate
        assert optimizer.grad_norm() == pytest.approx(norm, rel=1e-6)
        optimizer.step(norm)
        optimizer.clear()
        for name, weight in weights.items():
            first[name] = config.adam_beta1 * first[name] + (1 - config.adam_beta1) * gradients[name]
            second[name] = config.adam_beta2 * second[name] + (1 - config.adam_beta2) * gradients[name] ** 2
            mean = first[name] / (1 - config.adam_beta1 ** (step + 1))
            square = second[name] / (1 - config.adam_beta2 ** (step + 1))
            weight *= 1 - rate * (0.1 if name == "a" else 0.0)
            weight -= rate * mean / (square.sqrt() + config.adam_eps)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach().double(), weights[name], rtol=1e-5, atol=1e-6)
        assert parameter.grad is None


def test_the_norm_is_that_of_the_gradients_asked_for():
    parameters = {name: nn.Parameter(torch.zeros(1)) for name in "abc"}
    optimizer = ClippedAdamW(parameters, config_of())
    assert optimizer.grad_norm() == 0.0
    parameters["a"].grad, parameters["b"].grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert optimizer.grad_norm() == 5.0
    assert optimizer.grad_norm({"b", "c"}) == 4.0
    assert optimizer.grad_norm(set()) == 0.0


def test_an_optimizer_goes_on_from_what_another_one_held():
    config = config_of(schedule="linear", total_steps=9, weight_decay=0.1)
    parameters = make_parameters()
    optimizer = ClippedAdamW(parameters, config)
    for step in range(2):
        differentiate(parameters, step)
        optimizer.step(1.0)
    copies = {name: nn.Parameter(each.detach().clone()) for name, each in parameters.items()}
    resumed = ClippedAdamW(copies, config)
    differentiate(copies, 7)
    resumed.step(1.0)  # it has a state of its own, which goes
    for name, each in parameters.items():
        copies[name].data.copy_(each.detach())
    states = {
        name: (optimizer.steps_of(name), {key: each.clone() for key, each in optimizer.state_of(name).items()})
        for name in parameters
    }
    resumed.load_state(((name, *state) for name, state in states.items()), optimizer.steps_taken)
    assert (resumed.steps_taken, resumed.learning_rate) == (2, optimizer.learning_rate)
    for each, held in ((optimizer, parameters), (resumed, copies)):
        differentiate(held, 2)
        each.step(1.0)
    assert all(torch.equal(copies[name], each) for name, each in parameters.items())
    resumed.load_state([("a", *states["a"])], 2)
    assert resumed.steps_of("b") is None, "what never had a gradient has no moments"


class Counted:
    """An optimizer that notes the norms it has clipped from."""

    def __init__(self):
        self.steps_taken, self.learning_rate, self.norms = 0, 0.1, []

    def step(self, grad_norm):
        self.norms.append(grad_norm)
        self.steps_taken += 1
        self.learning_rate = 0.2


def steps_of(optimizer, own="", others=()):
    return Steps(optimizer, lambda value: [*others, value], ["first", "second", "third"], lambda: own)


def test_a_step_says_its_norm_and_the_rate_it_was_taken_with():
    optimizer = Counted()
    metrics = steps_of(optimizer).take(3.0, bad_loss=False)
    assert optimizer.norms == [3.0]
    assert (metrics["grad_norm"].value, metrics["grad_norm"].weight) == (3.0, 1.0)
    assert (metrics["learning_rate"].value, metrics["steps_refused"].value) == (0.1, 0.0)


@pytest.mark.parametrize(
    ("norm", "bad_loss", "own", "others", "words"),
    [
        (math.inf, False, "third", ["second", ""], "the gradient of second is not finite"),
        (math.nan, False, "", ["", ""], "the gradient norm is not finite"),
        (1.0, True, "", [""], "the loss is not finite"),
        (math.nan, True, "third", [""], "the gradient of third is not finite"),
    ],
)
def test_a_step_that_is_not_finite_is_refused_and_the_first_tensor_of_all_ranks_named(
    norm, bad_loss, own, others, words, caplog
):
    optimizer = Counted()
    steps = steps_of(optimizer, own, others)
    steps.take(1.0, bad_loss=False)
    with caplog.at_level(logging.WARNING):
        metrics = steps.take(norm, bad_loss=bad_loss)
    assert optimizer.norms == [1.0], "nothing was updated"
    assert (steps.refused, steps.last_refusal) == (1, f"update 1: {words}; the weights were left as they were")
    assert steps.last_refusal in caplog.text
    assert (metrics["grad_norm"].weight, metrics["grad_norm"].value) == (0.0, 0.0)
    assert metrics["steps_refused"].value == 1.0
    steps.take(2.0, bad_loss=False)
    assert (steps.refused, optimizer.norms) == (1, [1.0, 2.0])


def sequence(prompt, completion, *, seed=0, **extras):
    ids = np.random.default_rng(seed).integers(3, 50, prompt + completion).astype(np.int32)
    return TrainSequence(ids=ids, loss_mask=np.arange(len(ids)) >= prompt, extras=extras)


def test_what_no_loss_token_is_in_takes_no_part_and_extras_must_be_alike():
    silent = sequence(3, 0)
    speaking = [sequence(3, 2, advantage=np.ones(5, np.float32)) for _ in range(2)]
    assert with_loss_tokens([speaking[0], silent, speaking[1]]) == speaking
    with pytest.raises(ShapeError, match="same extras"):
        with_loss_tokens([*speaking, sequence(3, 2)])


def ones(batch):
    return torch.full((len(batch.target_N),), -1.0, requires_grad=True)


def test_a_loss_gets_the_tokens_of_its_micro_batch_and_the_totals_of_the_update():
    sequences = [
        sequence(4, 1 + number, seed=number, place=np.full(5 + number, number, np.float32)) for number in (0, 1, 2)
    ]
    seen = []

    def loss(tokens):
        seen.append(tokens)
        return -tokens.logprobs_N.sum() / tokens.total_tokens, {"mine": Metric(value=1.0, how="sum")}

    calls = LossCalls(sequences, loss)
    for families in ([1, 2], [0]):
        chosen = plan_packs([sequences[each] for each in families], budget=99, share_prompts=False)
        [batch] = [lay_out([sequences[each] for each in families], each) for each in chosen]
        batch = type(batch)(**{**vars(batch), "members": tuple(families[each] for each in batch.members)})
        value = calls.of(batch, ones(batch), torch.zeros(len(batch.target_N)))
        assert float(value.detach()) == pytest.approx(len(batch.target_N) / 6)
    assert [(each.total_tokens, each.total_sequences, each.num_sequences) for each in seen] == [(6, 3, 2), (6, 3, 1)]
    assert sorted(seen[0].extras["place"].tolist()) == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert calls.results == [], "nothing is read before the last micro-batch"
    calls.read()
    assert [each["num_microbatches"].value for each in calls.results] == [1.0, 1.0]
    assert calls.results[0]["loss"].value == pytest.approx(5 / 6)
    assert calls.results[0]["mine"].value == 1.0
    assert calls.results[0]["sequence_tokens"].value == 6 + 7
    assert (calls.failure, calls.not_finite) == (None, False)


def one_batch(sequences):
    return lay_out(sequences, plan_packs(sequences, budget=99, share_prompts=False)[0])


def test_a_loss_that_raises_gives_nothing_to_differentiate_and_is_remembered():
    sequences = [sequence(4, 2)]
    batch, asked = one_batch(sequences), []

    def breaks(tokens):
        asked.append(tokens)
        raise ValueError("a division by zero")

    calls = LossCalls(sequences, breaks)
    for _ in range(2):
        assert calls.of(batch, ones(batch), torch.zeros(2)) is None
    assert isinstance(calls.failure, ValueError)
    assert (len(asked), calls.results) == (1, []), "it is not asked again"
    wrong = LossCalls(sequences, lambda tokens: (tokens.logprobs_N, {}))
    assert wrong.of(batch, ones(batch), torch.zeros(2)) is None
    assert isinstance(wrong.failure, OffbeatError)


def test_a_loss_that_is_not_finite_is_remembered_and_gives_a_gradient_of_zero():
    sequences = [sequence(4, 2)]
    batch = one_batch(sequences)
    factors = iter([1.0, math.inf, math.nan, 1.0])
    calls = LossCalls(sequences, lambda tokens: (tokens.logprobs_N.sum() * next(factors), {}))
    gradients = []
    for _ in range(4):
        answer = ones(batch)
        calls.of(batch, answer * 1.0, torch.zeros(2)).backward()
        gradients.append(answer.grad.tolist())
    assert gradients == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    calls.read()
    assert (calls.failure, calls.not_finite, len(calls.results)) == (None, True, 4)


def test_metrics_that_are_deferred_are_read_with_the_losses_and_a_fault_of_theirs_is_the_losses():
    sequences = [sequence(4, 2)]
    batch = one_batch(sequences)

    def measured(tokens):
        logprobs_N = tokens.logprobs_N.detach()
        sums = DeferredMetrics([logprobs_N], lambda values: {"sum": Metric(value=values[0].sum(), how="sum")})
        return tokens.logprobs_N.sum(), sums | {"plain": Metric(value=3.0)}

    calls = LossCalls(sequences, measured)
    for _ in range(2):
        calls.of(batch, ones(batch), torch.zeros(2))
    calls.read()
    assert [(each["sum"].value, each["plain"].value) for each in calls.results] == [(-2.0, 3.0)] * 2
    late = LossCalls(sequences, lambda tokens: (tokens.logprobs_N.sum(), DeferredMetrics([], lambda _: 1 / 0)))
    late.of(batch, ones(batch), torch.zeros(2))
    late.read()
    assert isinstance(late.failure, ZeroDivisionError)


class Gathered:
    """Ranks each of whose share is known."""

    def __init__(self, shares):
        self.shares = shares

    def gather_shares(self, values, counts):
        assert [len(each) for each in self.shares] == counts
        return self.shares


def test_answers_of_all_shares_come_back_to_their_sequences():
    sequences = [sequence(2 + number % 3, number % 4, seed=number) for number in range(9)]
    shares = plan_shares(sequences, budget=8, share_prompts=True, num_shares=3)
    values = {
        member: np.arange(int(sequences[member].loss_mask.sum()), dtype=np.float32) + 10 * member + 1
        for member in range(len(sequences))
    }
    answers = []
    for share in shares:
        members = [member for batch in share for family in batch for member in family.members]
        answers.append(np.concatenate([np.zeros(0, np.float32), *(values[member] for member in members)]))
    found = answers_of_all(Gathered(answers), sequences, shares, [torch.from_numpy(answers[0])])
    for member, (each, answer) in enumerate(zip(sequences, found, strict=True)):
        np.testing.assert_array_equal(answer[each.loss_mask], values[member])
        assert not answer[~each.loss_mask].any()
