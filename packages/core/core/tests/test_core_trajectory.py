"""A trajectory keeps the tokens that were sampled, and says which they are."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_core import Completion, Reply, ShapeError, Trajectory, VersionSegment


def turn(sampled, version=0, stop_reason="eos"):
    return Completion(
        ids=np.array(sampled, np.int32),
        logprobs=-np.array(sampled, np.float32),
        segments=(VersionSegment(version=version, num_tokens=len(sampled)),),
        stop_reason=stop_reason,
        text=f"<{sampled}>",
    )


def reply(read):
    return Reply(ids=np.array(read, np.int32), text=f"({read})")


ids = st.lists(st.integers(1, 99), max_size=5)


@given(
    prompt=st.lists(st.integers(1, 99), min_size=1, max_size=4),
    first=ids,
    parts=st.lists(st.tuples(ids, ids), max_size=4),
)
def test_the_training_sequence_is_every_token_in_order_with_the_loss_on_the_sampled_ones(prompt, first, parts):
    said = [first, *(sampled for _, sampled in parts)]
    trajectory = Trajectory(
        turns=tuple(turn(sampled) for sampled in said), replies=tuple(reply(read) for read, _ in parts)
    )
    sequence = trajectory.to_sequence(np.array(prompt, np.int32))
    after = first + [token for read, sampled in parts for token in read + sampled]
    assert sequence.ids.tolist() == prompt + after
    assert trajectory.ids.tolist() == after
    assert sequence.ids.dtype == trajectory.ids.dtype == np.int32
    sampled_ids = [token for sampled in said for token in sampled]
    assert sequence.ids[sequence.loss_mask].tolist() == sampled_ids
    assert sequence.loss_mask.tolist() == [False] * len(prompt) + trajectory.loss_mask.tolist()
    assert trajectory.logprobs.tolist() == [-token for token in sampled_ids]
    assert trajectory.num_tokens == len(sampled_ids) == sum(each.num_tokens for each in trajectory.segments)


def test_images_of_replies_come_after_those_of_the_prompt_in_order():
    images = [np.full((8, 8, 3), number, np.uint8) for number in range(4)]
    shown = [replace(reply([5]), images=tuple(images[1:3])), reply([6]), replace(reply([7]), images=(images[3],))]
    trajectory = Trajectory(turns=tuple(turn([4]) for _ in range(4)), replies=tuple(shown))
    assert [int(image[0, 0, 0]) for image in trajectory.images] == [1, 2, 3]
    sequence = trajectory.to_sequence(np.array([9], np.int32), (images[0],))
    assert [int(image[0, 0, 0]) for image in sequence.images] == [0, 1, 2, 3]


def test_every_turn_keeps_its_versions_and_lag_counts_from_the_oldest():
    trajectory = Trajectory(turns=(turn([1, 2], version=7), turn([4], version=9)), replies=(reply([3]),))
    assert trajectory.segments == (
        VersionSegment(version=7, num_tokens=2),
        VersionSegment(version=9, num_tokens=1),
    )
    assert (trajectory.oldest_version, trajectory.num_versions) == (7, 2)


def test_a_completion_of_lists_has_a_segment_for_each_version_in_turn_and_is_aborted_until_it_ends():
    runs = [(3, 1), (3, 2), (4, 1), (3, 1)]
    joined = Completion.join([5, 6, 7, 8, 9], [-0.5] * 5, runs, None, "words")
    assert [(each.version, each.num_tokens) for each in joined.segments] == [(3, 3), (4, 1), (3, 1)]
    assert (joined.ids.tolist(), joined.ids.dtype, joined.logprobs.dtype) == ([5, 6, 7, 8, 9], np.int32, np.float32)
    assert (joined.stop_reason, joined.text, joined.oldest_version) == ("aborted", "words", 3)
    assert Completion.join([5], [-0.5], [(3, 1)], "length", "").stop_reason == "length"


@pytest.mark.parametrize(("stop_reason", "ended"), [("eos", "done"), ("stop", "done"), ("length", "cut_off")])
def test_one_completion_is_a_trajectory(stop_reason, ended):
    completion = turn([1, 2], stop_reason=stop_reason)
    trajectory = Trajectory.of(completion)
    assert (trajectory.ended, trajectory.stop_reason, trajectory.text) == (ended, stop_reason, completion.text)
    assert trajectory.ids.tolist() == [1, 2]
    assert trajectory.loss_mask.all()


def test_what_was_said_and_answered_can_be_read():
    assert Trajectory(turns=(turn([1]), turn([3])), replies=(reply([2]),)).text == "<[1]>([2])<[3]>"


@pytest.mark.parametrize(("num_turns", "num_replies"), [(0, 0), (1, 1), (2, 0)])
def test_turns_without_replies_between_them_are_refused(num_turns, num_replies):
    with pytest.raises(ShapeError, match=f"got {num_turns} turns and {num_replies} replies"):
        Trajectory(turns=(turn([1]),) * num_turns, replies=(reply([2]),) * num_replies)
