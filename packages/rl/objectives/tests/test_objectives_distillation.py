"""The teacher's advantages give the gradient of the reverse divergence, enumerated exactly in float64."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_core import LossTokens, ShapeError
from offbeat_objectives import AlgorithmConfig, build_loss, compute_advantages, distill

VOCABULARY = 3


def config(**changes):
    return AlgorithmConfig(
        **{
            "advantage": "none",
            "distillation_coefficient": 1.0,
            "aggregation": "fixed_length",
            "fixed_length": 1,
            "loss": "ppo_clip",
            **changes,
        }
    )


@given(
    st.lists(st.integers(0, 5), max_size=6),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.floats(0.1, 3),
    st.integers(0, 2**31),
)
@settings(max_examples=50)
def test_advantages_equal_loops_over_tokens(lengths, discount, coefficient, seed):
    draw = torch.Generator().manual_seed(seed)
    student = -30 * torch.rand(sum(lengths), generator=draw, dtype=torch.float64)
    teacher = -30 * torch.rand(sum(lengths), generator=draw, dtype=torch.float64)
    expected, start = [], 0
    for length in lengths:
        gains = [max(-20.0, min(20.0, float(teacher[i] - student[i]))) for i in range(start, start + length)]
        expected += [coefficient * sum(discount ** (u - t) * gains[u] for u in range(t, length)) for t in range(length)]
        start += length
    found = distill(
        config(distillation_coefficient=coefficient, distillation_discount=discount),
        student,
        teacher,
        torch.tensor(lengths, dtype=torch.int64),
    )
    assert found.advantages_N.dtype == torch.float32
    torch.testing.assert_close(found.advantages_N, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert bool(found.metrics) == bool(sum(lengths))


class TwoTokens:
    """Student and teacher over sequences of two tokens, as tables of logits."""

    def __init__(self):
        draw = torch.Generator().manual_seed(11)
        self.first = torch.randn(VOCABULARY, generator=draw, dtype=torch.float64, requires_grad=True)
        self.second = torch.randn(VOCABULARY, VOCABULARY, generator=draw, dtype=torch.float64, requires_grad=True)
        self.teacher_first = torch.randn(VOCABULARY, generator=draw, dtype=torch.float64).log_softmax(-1)
        self.teacher_second = torch.randn(VOCABULARY, VOCABULARY, generator=draw, dtype=torch.float64).log_softmax(-1)

    def student(self):
        return self.first.log_softmax(-1), self.second.log_softmax(-1)

    def expected_loss(self, algorithm):
        """The loss of each sequence, weighed by how often the student samples it."""
        first, second = self.student()
        total = torch.zeros((), dtype=torch.float64)
        for a, b in itertools.product(range(VOCABULARY), repeat=2):
            logprobs_N = torch.stack([first[a], second[a, b]])
            old_N = logprobs_N.detach()
            teacher_N = torch.stack([self.teacher_first[a], self.teacher_second[a, b]])
            lengths_S = torch.tensor([2])
            rewards, _ = compute_advantages(algorithm, torch.tensor([7.0]), torch.tensor([0]), lengths_S)
            tokens = LossTokens(
                logprobs_N=logprobs_N,
                entropy_N=torch.zeros_like(old_N),
                sequence_N=torch.zeros(2, dtype=torch.int64),
                num_sequences=1,
                extras={
                    "advantages": rewards + distill(algorithm, old_N, teacher_N, lengths_S).advantages_N,
                    "old_logprobs": old_N,
                },
                total_tokens=2,
                total_sequences=1,
            )
            loss, _ = build_loss(algorithm)(tokens)
            total = total + old_N.sum().exp() * loss
        return total

    def divergence(self, *, through_sampling):
        """KL of whole sequences; without `through_sampling` that of each state visited, the visits held fixed."""
        first, second = self.student()
        of_first = (first.exp() * (first - self.teacher_first)).sum()
        of_second = (second.exp() * (second - self.teacher_second)).sum(-1)
        visits = first.exp() if through_sampling else first.exp().detach()
        return of_first + (visits * of_second).sum()


@pytest.mark.parametrize("discount", [0.0, 1.0], ids=["each token", "whole sequences"])
def test_the_gradient_is_that_of_the_reverse_divergence(discount):
    model = TwoTokens()
    wanted = torch.autograd.grad(model.divergence(through_sampling=discount == 1.0), (model.first, model.second))
    found = torch.autograd.grad(
        model.expected_loss(config(distillation_discount=discount)), (model.first, model.second)
    )
    for one, other in zip(found, wanted, strict=True):
        assert float(other.abs().max()) > 0.01, "nothing to compare"
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_it_adds_to_the_advantages_of_rewards():
    rewards, prompts, lengths = torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([1, 2])
    alone, _ = compute_advantages(AlgorithmConfig(advantage="none"), rewards, prompts, lengths)
    assert alone.tolist() == [0.0, 0.0, 0.0]
    assert compute_advantages(AlgorithmConfig(), rewards, prompts, lengths)[0].abs().min() > 0.5


def test_a_teacher_of_other_tokens_is_refused():
    with pytest.raises(ShapeError, match="distill"):
        distill(config(), torch.zeros(3), torch.zeros(2), torch.tensor([3]))
