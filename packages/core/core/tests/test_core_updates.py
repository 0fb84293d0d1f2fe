"""Updates of every training engine: the same values reach the same tokens, and all ranks get the results of all."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_core import (
    ConfigError,
    DeferredMetrics,
    LossTokens,
    Metric,
    ModelError,
    OffbeatError,
    PeerFailedError,
    TrainEngineConfig,
    TrainLayout,
    TrainSequence,
    call_loss,
    check_schedule,
    check_token_ids,
    digest_sequences,
    learning_rate_at,
    loss_extras,
    merge_over_ranks,
    spread_values,
)


def sequence_of(ids, first, **extras):
    return TrainSequence(ids=np.array(ids, np.int32), loss_mask=np.arange(len(ids)) >= first, extras=extras)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=8), st.data())
def test_values_come_back_to_the_tokens_they_are_of(lengths, data):
    sequences = [sequence_of(list(range(1, n + 1)), first) for n, first in lengths]
    order = data.draw(st.permutations(range(len(sequences))))
    cut = data.draw(st.integers(0, len(order)))
    members = [order[:cut], order[cut:]]
    values = [np.concatenate([[], *(sequences[m].ids[sequences[m].loss_mask] for m in share)]) for share in members]
    for sequence, found in zip(sequences, spread_values(sequences, members, values), strict=True):
        np.testing.assert_array_equal(found, np.where(sequence.loss_mask, sequence.ids, 0))


def test_extras_are_those_of_the_loss_tokens_in_order():
    found = loss_extras(
        [
            sequence_of([5, 6, 7], 1, b=np.arange(3), a=np.arange(3) + 10),
            sequence_of([8, 9], 1, b=np.ones(2), a=np.zeros(2)),
        ]
    )
    assert {name: values.tolist() for name, values in found.items()} == {"a": [11, 12, 0], "b": [1, 2, 1]}
    assert list(found) == ["a", "b"]


def test_token_ids_lie_in_the_vocabulary():
    check_token_ids([sequence_of([0, 9], 1), sequence_of([], 1)], 10)
    with pytest.raises(ModelError, match=r"must be in \[0, 9\): got 0 to 9"):
        check_token_ids([sequence_of([0, 9], 1)], 9)


class Scalar:
    """The part of a tensor's interface that is used here."""

    def __init__(self, *shape):
        self.shape = shape

    def numel(self):
        return int(np.prod(self.shape))

    def reshape(self, shape):
        return Scalar(*shape)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ((0.5, {}), "got 0.5 for the scalar"),
        ((Scalar(2, 3), {}), r"got a tensor of shape \(2, 3\) for the scalar"),
        ((Scalar(1), {"kl": 0.1}), "got kl = 0.1"),
    ],
)
def test_a_loss_must_return_a_scalar_and_metrics(said, text):
    one = Scalar(1)
    tokens = LossTokens(
        logprobs_N=one, entropy_N=one, sequence_N=one, num_sequences=1, extras={}, total_tokens=1, total_sequences=1
    )
    assert call_loss(lambda _: (Scalar(1), {"kl": Metric(value=np.float32(2))}), tokens)[0].shape == ()
    with pytest.raises(OffbeatError, match=text):
        call_loss(lambda _: said, tokens)


class Numbers:
    """The part of a tensor's interface by which numbers reach the host; counts how often they do."""

    def __init__(self, *values):
        self.values, self.copies = np.array(values), 0

    def detach(self):
        return self

    def cpu(self):
        self.copies += 1
        return self.values


def test_deferred_metrics_are_read_when_they_are_looked_into_or_from_what_was_copied():
    def deferred(numbers, name):
        return DeferredMetrics([numbers], lambda values: {name: Metric(value=float(values[0].sum()), how="sum")})

    first, second = Numbers(1.0, 2.0), Numbers(5.0)
    both = deferred(first, "a") | deferred(second, "b") | {"c": Metric(value=9.0)}
    assert both.numbers == (first, second)
    assert (first.copies, second.copies) == (0, 0)
    assert {name: metric.value for name, metric in both.items()} == {"a": 3.0, "b": 5.0, "c": 9.0}
    assert (len(both), first.copies, second.copies) == (3, 1, 1)
    copied = deferred(first, "a") | deferred(second, "b")
    assert copied.read([np.array([4.0]), np.array([6.0])])["b"].value == 6.0
    assert (copied["a"].value, first.copies) == (4.0, 1)


def ask_all(results, failures, speakers):
    """What each of four ranks in two shares gets: (metrics, or the error)."""
    said = []

    def say(value):
        said.append(value)
        raise InterruptedError

    def call(rank, exchange):
        return merge_over_ranks(
            results[rank], failures[rank], share=rank // 2, speaks=speakers[rank], exchange=exchange
        )

    for rank in range(4):
        with pytest.raises(InterruptedError):
            call(rank, say)
    found = []
    for rank in range(4):
        try:
            found.append(call(rank, lambda _: said))
        except Exception as error:  # noqa: BLE001
            found.append(error)
    return found


def test_each_share_is_counted_once_and_all_ranks_get_the_same():
    results = [[{"n": Metric(value=value, how="sum")}] for value in (1.0, 1.0, 4.0, 4.0)]
    found = ask_all(results, [None] * 4, [False, True, True, False])
    assert found == [{"n": Metric(value=5.0, weight=2.0, how="sum")}] * 4


def test_all_ranks_hear_of_the_one_that_failed():
    mixed = [{"n": Metric(value=1, how="sum")}, {"n": Metric(value=1)}]
    for failure, batches in ((ValueError("no"), [[]] * 4), (None, [[], [], mixed, []])):
        found = ask_all(batches, [None, None, failure, None], [True, False, True, False])
        assert isinstance(found[2], ValueError)
        for other in (found[0], found[1], found[3]):
            assert isinstance(other, PeerFailedError)
            assert "trainer rank 2" in str(other)


CHANGES = {
    "ids": {"ids": np.array([5, 6, 8], np.int32)},
    "loss mask": {"loss_mask": np.array([False, False, True])},
    "extras": {"extras": {"a": np.ones(3, np.float32)}},
    "name of an extra": {"extras": {"b": np.zeros(3, np.float32)}},
    "images": {"images": (np.ones((2, 2, 3), np.uint8),)},
    "group": {"group": 1},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_digest_is_of_all_that_an_update_reads(change):
    image = np.zeros((2, 2, 3), np.uint8)
    sequence = dataclasses.replace(sequence_of([5, 6, 7], 1, a=np.zeros(3, np.float32)), images=(image,))
    same, other = dataclasses.replace(sequence), dataclasses.replace(sequence, **change)
    assert digest_sequences([sequence]) == digest_sequences([same]) != digest_sequences([other])


def train_config(**settings):
    return TrainEngineConfig(model_path="", learning_rate=1.0, **settings)


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, {0: 1.0, 10**6: 1.0}),
        ({"warmup_steps": 3}, {0: 0.25, 2: 0.75, 3: 1.0, 99: 1.0}),
        ({"schedule": "linear", "warmup_steps": 5, "total_steps": 15}, {4: 5 / 6, 5: 1.0, 10: 0.5, 14: 0.1, 99: 0.0}),
        ({"schedule": "cosine", "total_steps": 8, "min_learning_rate_ratio": 0.2}, {0: 1.0, 4: 0.6, 8: 0.2, 9: 0.2}),
    ],
    ids=["constant", "warm-up", "linear", "cosine"],
)
def test_a_learning_rate_rises_to_its_peak_and_falls_to_its_end(settings, rates):
    config = train_config(**settings)
    assert {step: learning_rate_at(step, config) for step in rates} == pytest.approx(rates)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "linear", "warmup_steps": 5, "total_steps": 5}, "total_steps above warmup_steps: got 5 and 5"),
        ({"lora_alpha": 8.0}, "lora_alpha has no effect while lora_rank is 0"),
    ],
)
def test_a_schedule_that_ends_with_its_warm_up_and_a_scale_of_no_adapters_are_refused(settings, message):
    check_schedule(train_config(schedule="linear", warmup_steps=5, total_steps=6, lora_rank=4, lora_alpha=8.0))
    check_schedule(train_config(warmup_steps=5))
    with pytest.raises(ConfigError, match=message):
        check_schedule(train_config(**settings))


def test_the_scale_of_adapters_is_2_unless_it_is_set():
    assert train_config(lora_rank=4).lora_scale == train_config(lora_rank=16).lora_scale == 2.0
    assert train_config(lora_rank=4, lora_alpha=2.0).lora_scale == 0.5


def test_ranks_hold_their_share_of_what_is_shared_out():
    """Here 120 weights on 2 x 3 ranks, each of 4 bytes, with a gradient of 4 and moments of 8."""
    held = [TrainLayout(dp=3, tp=2, zero_stage=stage).held_bytes(120) for stage in range(4)]
    assert held == [60 * 16, 60 * 8 + 20 * 8, 60 * 4 + 20 * 12, 20 * 16]
    assert TrainLayout(dp=3, tp=2, zero_stage=2).held_bytes(120, trains_all=False) == 60 * 4
    frozen = TrainLayout(dp=3, tp=2, zero_stage=3, frozen_weight_bytes=2)
    assert (frozen.held_bytes(120, trains_all=False), frozen.held_bytes(120)) == (20 * 2, 20 * 16)
    assert TrainLayout(dp=3, tp=2, pp=2, whole_parameters=40).held_bytes(120) == (80 // 2 + 40) // 2 * 16
