"""Trees of calls become trajectories in which every sampled token is trained once, where it was sampled."""

import time
from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbeat_core import Completion, Routes
from offbeat_serve._calls import RecordedCall, RefusedCall, trajectories_of

NO_PROMPT = np.array([], np.int32)


def said(ids, logprob, version=0, stop_reason="eos"):
    return Completion.join(ids, [logprob] * len(ids), [(version, len(ids))], stop_reason, "")


def call(prompt, ids, number=0):
    """A call whose tokens differ from those of all others in their log-probability."""
    return RecordedCall(prompt_ids=np.array(prompt, np.int32), completion=said(ids, -float(number)))


ids = st.lists(st.integers(0, 2), min_size=1, max_size=3)  # few tokens, so that prompts are alike by chance too


@st.composite
def trees_of_calls(draw):
    """Calls in an order in which they may have ended: each continues an earlier one, or begins anew."""
    calls = []
    for number in range(draw(st.integers(1, 12))):
        parent = draw(st.integers(-1, number - 1))
        before = [] if parent < 0 else calls[parent].end_ids.tolist()
        added = draw(ids if parent < 0 else st.lists(st.integers(0, 2), max_size=2))
        calls.append(call([*before, *added], draw(ids), number))
    return calls


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(trees_of_calls())
def test_each_sampled_token_is_trained_once_and_in_its_own_context(calls):
    wanted = Counter(
        (tuple(each.prompt_ids.tolist()), tuple(each.completion.ids.tolist()), float(each.completion.logprobs[0]))
        for each in calls
    )
    found = Counter()
    for trajectory in trajectories_of(calls, str):
        sequence = trajectory.to_sequence(NO_PROMPT)
        assert int(sequence.loss_mask.sum()) == trajectory.num_tokens
        at, context = len(trajectory.prompt_ids), 0
        for number, turn in enumerate(trajectory.turns):
            end = at + len(turn.ids)
            assert sequence.ids[at:end].tolist() == turn.ids.tolist()
            assert sequence.loss_mask[at:end].all()
            found[(tuple(sequence.ids[:at].tolist()), tuple(turn.ids.tolist()), float(turn.logprobs[0]))] += 1
            context += len(turn.ids)
            at = end + (len(trajectory.replies[number].ids) if number < len(trajectory.replies) else 0)
        assert at == len(sequence.ids)
        assert context == int(sequence.loss_mask.sum())
    assert found == wanted


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(trees_of_calls())
def test_a_call_begins_a_trajectory_only_where_nothing_lets_it_go_on(calls):
    trajectories = trajectories_of(calls, str)
    ends = [trajectory.to_sequence(NO_PROMPT).ids.tolist() for trajectory in trajectories]
    seen = set()
    for trajectory, end in zip(trajectories, ends, strict=True):
        begin = tuple(trajectory.prompt_ids.tolist())
        # No earlier trajectory ends where this one begins: it would have continued it.
        assert not any(begin[: len(other)] == other for other in seen)
        seen.add(tuple(end))


def test_a_conversation_is_one_trajectory_and_keeps_its_versions():
    first = RecordedCall(prompt_ids=np.array([1, 2], np.int32), completion=said([3, 4], -1.0, version=5))
    second = RecordedCall(
        prompt_ids=np.array([1, 2, 3, 4, 9], np.int32),
        completion=Completion.join([6, 7], [-2.0, -3.0], [(5, 1), (6, 1)], "length", "end"),
    )
    [trajectory] = trajectories_of([first, second], lambda ids: f"<{ids.tolist()}>")
    assert trajectory.ids.tolist() == [3, 4, 9, 6, 7]
    assert trajectory.loss_mask.tolist() == [True, True, False, True, True]
    assert trajectory.logprobs.tolist() == [-1.0, -1.0, -2.0, -3.0]
    assert [(each.version, each.num_tokens) for each in trajectory.segments] == [(5, 2), (5, 1), (6, 1)]
    assert (trajectory.ended, trajectory.replies[0].text) == ("cut_off", "<[9]>")


def test_a_turn_keeps_the_routes_that_the_turn_before_it_does_not_know():
    first = call([1, 2], [3, 4], 1)
    second = call([1, 2, 3, 4, 9], [6], 2)
    routed = [
        replace(each, completion=replace(each.completion, routes=Routes.pack(np.full((length, 1, 1), number))))
        for number, (each, length) in enumerate([(first, 3), (second, 5)])
    ]
    [trajectory] = trajectories_of(routed, str)
    starts = [(turn.routes.start, turn.routes.stop) for turn in trajectory.turns]
    assert starts == [(0, 3), (3, 5)]


def test_a_compacted_context_begins_a_trajectory_and_a_branch_holds_what_it_left():
    calls = [call([1], [2], 1), call([1, 2, 9], [3], 2), call([1, 2, 8], [4], 3), call([7], [5], 4)]
    main, branch, compacted = trajectories_of(calls, str)
    assert (main.prompt_ids.tolist(), main.ids.tolist()) == ([1], [2, 9, 3])
    assert (branch.prompt_ids.tolist(), branch.ids.tolist()) == ([1, 2, 8], [4])
    assert (compacted.prompt_ids.tolist(), compacted.ids.tolist()) == ([7], [5])


def test_a_call_goes_on_with_the_longest_that_it_begins_with_and_of_equal_ones_with_the_earliest():
    longer, shorter = call([1], [2, 3], 1), call([1], [2], 2)
    found = trajectories_of([longer, shorter, call([1, 2, 3, 9], [4], 3)], str)
    assert [each.ids.tolist() for each in found] == [[2, 3, 9, 4], [2]]
    early, late = call([1], [2], 1), call([1], [2], 2)
    found = trajectories_of([early, late, call([1, 2, 9], [4], 3)], str)
    assert [each.logprobs.tolist() for each in found] == [[-1.0, -3.0], [-2.0]]


def test_a_refused_call_ends_the_trajectory_that_it_would_have_gone_on_with():
    main, sub_agent = call([1], [2], 1), call([7], [5], 2)
    for prompt, ends in (([1, 2, 9], ["max_turns", "done"]), ([8], ["done", "max_turns"])):
        refused = RefusedCall(prompt_ids=np.array(prompt, np.int32), ended="max_turns")
        assert [each.ended for each in trajectories_of([main, sub_agent], str, refused)] == ends
        assert trajectories_of([], str, refused) == ()


def test_a_last_turn_that_is_too_long_stays_cut_off_whatever_was_refused_after_it():
    last = RecordedCall(prompt_ids=np.array([1], np.int32), completion=said([2], -1.0, stop_reason="length"))
    refused = RefusedCall(prompt_ids=np.array([1, 2, 3], np.int32), ended="max_tokens")
    assert [each.ended for each in trajectories_of([last], str, refused)] == ["cut_off"]


def time_of(num_calls):
    """Processor time of calls that no other continues, each of a prompt of its own length and words."""
    rng = np.random.default_rng(0)
    calls = [call(rng.integers(0, 9, int(rng.integers(50, 1000))), [1, 2]) for _ in range(num_calls)]
    began_s = time.process_time()
    assert len(trajectories_of(calls, str)) == num_calls
    return time.process_time() - began_s


def test_four_times_the_calls_take_about_four_times_as_long():
    time_of(100)
    assert time_of(6000) < 9 * time_of(1500)  # sixteen times, where each call is compared with all others
