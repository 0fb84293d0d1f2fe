"""Routes come back as they were packed, and a token keeps the route of the turn that computed it first."""

import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from offbeat_core import (
    Completion,
    Reply,
    Routes,
    ShapeError,
    TrainSequence,
    Trajectory,
    VersionSegment,
    digest_sequences,
    join_routes,
)


@given(
    ids_TLK=arrays.arrays(
        np.int64,
        st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 3)),
        elements=st.one_of(st.integers(-1, 3), st.integers(250, 260), st.just(32766)),
    ),
    start=st.integers(0, 9),
)
def test_routes_come_back_as_they_were_packed_whatever_the_number_of_experts(ids_TLK, start):
    packed = Routes.pack(ids_TLK, start=start)
    assert packed.unpack().tolist() == ids_TLK.tolist()
    assert packed.unpack().dtype == np.int16
    assert (packed.start, packed.stop) == (start, start + len(ids_TLK))
    assert packed.highest == (ids_TLK.max() if ids_TLK.size else -1)
    later = packed.since(start + 2)
    assert later.unpack().tolist() == ids_TLK[2:].tolist()
    assert later.stop == packed.stop


def test_a_number_of_an_expert_takes_a_byte_before_compression_and_more_experts_take_two():
    for highest, size in ((254, 1), (255, 2)):
        assert len(zlib.decompress(Routes.pack(np.full((3, 2, 4), highest)).packed.tobytes())) == 24 * size


@pytest.mark.parametrize("ids_TLK", [np.zeros((2, 2), int), np.full((1, 1, 1), -2), np.full((1, 1, 1), 32767)])
def test_what_is_no_route_is_refused(ids_TLK):
    with pytest.raises(ShapeError, match="routes must be"):
        Routes.pack(ids_TLK)


@pytest.mark.parametrize("packed", [b"no zlib", zlib.compress(b"short"), zlib.compress(bytes(10**6))])
def test_damaged_routes_are_refused_and_take_no_more_memory_than_was_promised(packed):
    damaged = replace(Routes.pack(np.zeros((2, 2, 2), int)), packed=np.frombuffer(packed, np.uint8))
    with pytest.raises(ShapeError, match="damaged"):
        damaged.unpack()


def test_a_token_takes_the_route_of_the_first_that_knows_it():
    known, unknown = [[1, 2]], [[-1, -1]]
    first = Routes.pack(np.array([known, unknown]))
    second = Routes.pack(np.array([[[3, 4]], [[5, 6]], unknown]))
    third = Routes.pack(np.array([[[7, 8]], [[9, 9]]]), start=2)
    found = join_routes([first, second, third], 5, (1, 2))
    assert found.tolist() == [known, [[5, 6]], [[7, 8]], [[9, 9]], unknown]
    assert join_routes([first, third], 3, (1, 2)).tolist() == [known, unknown, [[7, 8]]]
    assert join_routes([], 1, (1, 2)).tolist() == [unknown]


def turn(num_sampled, routes):
    ids = np.arange(num_sampled, dtype=np.int32)
    segment = VersionSegment(version=0, num_tokens=num_sampled)
    return Completion(ids=ids, logprobs=-ids.astype(np.float32), segments=(segment,), stop_reason="eos", routes=routes)


def test_a_trajectory_hands_on_what_its_turns_say_and_its_last_token_has_no_route():
    prompt_ids, reply = np.array([8, 9], np.int32), Reply(ids=np.array([7], np.int32))
    first = Routes.pack(np.array([0, 1, 2, -1])[:, None, None])
    second = Routes.pack(np.array([90, 91, 92, 93, 94, 95, -1])[:, None, None])
    trajectory = Trajectory(turns=(turn(2, first), turn(2, second.since(3))), replies=(reply,))
    sequence = trajectory.to_sequence(prompt_ids)
    # The first turn's last token was computed with the second turn, and so was the reply.
    assert join_routes(sequence.routes, 7, (1, 1))[:, 0, 0].tolist() == [0, 1, 2, 93, 94, 95, -1]
    assert Trajectory.of(turn(2, None)).to_sequence(prompt_ids).routes == ()


def test_routes_beyond_the_sequence_are_refused_and_ranks_compare_them():
    ids, mask = np.arange(3, dtype=np.int32), np.array([False, True, True])
    with pytest.raises(ShapeError, match="3 tokens has routes of 4"):
        TrainSequence(ids=ids, loss_mask=mask, routes=(Routes.pack(np.zeros((4, 1, 1), int)),))
    digests = {
        digest_sequences([TrainSequence(ids=ids, loss_mask=mask, routes=routes)])
        for routes in ((), (Routes.pack(np.zeros((3, 1, 1), int)),), (Routes.pack(np.ones((3, 1, 1), int)),))
    }
    assert len(digests) == 3
