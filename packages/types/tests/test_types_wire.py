"""Wire types refuse parts that do not fit together."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_types import Completion, SamplingParams, ShapeError, TrainSequence, VersionSegment


def completion(num_ids: int, num_logprobs: int, segments: list[tuple[int, int]]) -> Completion:
    return Completion(
        ids=np.zeros(num_ids, np.int32),
        logprobs=np.zeros(num_logprobs, np.float32),
        segments=tuple(VersionSegment(version=version, num_tokens=tokens) for version, tokens in segments),
        stop_reason="length",
    )


@given(segments=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=6))
def test_segments_cover_the_tokens_and_lag_counts_from_the_oldest(segments: list[tuple[int, int]]) -> None:
    num_tokens = sum(tokens for _, tokens in segments)
    made = completion(num_tokens, num_tokens, segments)
    assert made.oldest_version == min((version for version, _ in segments), default=0)


@given(sizes=st.tuples(*[st.integers(0, 6)] * 3).filter(lambda sizes: len(set(sizes)) > 1))
def test_parts_of_different_length_are_refused(sizes: tuple[int, int, int]) -> None:
    num_ids, num_logprobs, covered = sizes
    with pytest.raises(ShapeError, match=f"got {num_ids}, {num_logprobs} and {covered}"):
        completion(num_ids, num_logprobs, [(0, covered)])


def sequence(num_ids: int, mask: list[bool], **extras: int) -> TrainSequence:
    return TrainSequence(
        ids=np.zeros(num_ids, np.int32),
        loss_mask=np.array(mask, dtype=np.bool_),
        extras={name: np.zeros(size, np.float32) for name, size in extras.items()},
    )


def test_a_sequence_holds_arrays_of_one_length() -> None:
    assert sequence(3, [False, True, True], advantages=3).extras["advantages"].shape == (3,)
    assert sequence(0, []).ids.shape == (0,)


def test_an_array_of_another_length_is_named() -> None:
    with pytest.raises(ShapeError, match=r"shape of ids \(3,\): got {'old_logprobs': \(2,\)}"):
        sequence(3, [False, True, True], advantages=3, old_logprobs=2)
    with pytest.raises(ShapeError, match=r"got {'loss_mask': \(2,\)}"):
        sequence(3, [False, True])


def test_the_first_token_cannot_be_learnt() -> None:
    with pytest.raises(ShapeError, match=r"loss_mask\[0\] must be False"):
        sequence(2, [True, True])


def test_wire_types_do_not_change_once_made() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]
