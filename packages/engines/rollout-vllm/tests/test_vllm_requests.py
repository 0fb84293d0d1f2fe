from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

from offbeat_core import (
    Completion,
    ConfigError,
    DataError,
    GenerateRequest,
    RolloutCapabilities,
    SamplingParams,
    ScoreRequest,
    VersionSegment,
    WeightSyncError,
)
from offbeat_rollout_vllm._requests import (
    Requests,
    RequestState,
    RequestTable,
    Sample,
    ServedVersions,
    check_scores,
    read_scores,
    score_requests,
)
from offbeat_rollout_vllm._vllm_objects import Delta, check_request, prompt_logprobs, vllm_params

EOS = frozenset([2])


def request(name="r", num_samples=1, **params):
    return GenerateRequest(
        request_id=name, prompt_ids=np.asarray([5, 6]), num_samples=num_samples, params=SamplingParams(**params)
    )


def sample(**params):
    return Sample("r/0", request(**params), 0)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": 0.001}, "temperature must be 0, or at least 0.01"),
        ({"min_p": 0.1, "top_p": 0.9}, "use one of them"),
    ],
)
def test_what_no_user_meant_is_refused(params, text):
    with pytest.raises(ConfigError, match=text):
        check_request(request(**params), 50, 20)


def test_a_prompt_that_cannot_be_served_is_refused():
    with pytest.raises(DataError, match="the prompt has 2 tokens and max_model_len is 2"):
        check_request(request(), 50, 2)


def test_greedy_takes_no_cuts():
    params = SamplingParams(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1)
    check_request(request(**asdict(params)), 50, 20)
    assert not {"top_p", "top_k", "min_p"} & vllm_params(params, 1, EOS, 10).keys()


def test_end_of_sequence_is_a_stop_token_unless_it_is_ignored():
    params = SamplingParams(stop_token_ids=(9, 2))
    assert vllm_params(params, 1, frozenset([2, 3]), 10)["stop_token_ids"] == [2, 3, 9]
    ignoring = SamplingParams(stop_token_ids=(9,), ignore_eos=True)
    assert vllm_params(ignoring, 1, frozenset([2, 3]), 10)["stop_token_ids"] == [9]
    assert vllm_params(params, 1, EOS, 10)["ignore_eos"] is True


def test_a_completion_never_leaves_the_room_there_is():
    assert vllm_params(SamplingParams(max_tokens=256), 1, EOS, 10)["max_tokens"] == 10


def test_seeds_that_differ_anywhere_differ_in_what_the_generator_reads():
    seeds = [0, 1, 2, -1, 1 << 32, 1 << 40, (1 << 40) + 1, (1 << 63) - 1, 1 << 63]
    found = [vllm_params(SamplingParams(), seed, EOS, 10)["seed"] for seed in seeds]
    assert len({seed & 0xFFFFFFFF for seed in found}) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in found)


def test_stop_strings_see_special_tokens_and_stay_in_the_text():
    found = vllm_params(SamplingParams(stop=("<|im_end|>",)), 1, EOS, 10)
    assert found["detokenize"]
    assert found["include_stop_str_in_output"]
    assert found["skip_special_tokens"] is False
    assert not vllm_params(SamplingParams(), 1, EOS, 10)["detokenize"]


@pytest.mark.parametrize(
    ("ids", "last", "params", "reason"),
    [
        ([7, 2], {"finish_reason": "stop"}, {}, "eos"),
        ([7, 2], {"finish_reason": "stop"}, {"ignore_eos": True, "stop_token_ids": (2,)}, "stop"),
        ([7, 9], {"finish_reason": "stop"}, {"stop_token_ids": (9,)}, "stop"),
        ([7, 2], {"finish_reason": "stop", "stop_string": "ab"}, {}, "stop"),
        ([7, 8], {"finish_reason": "length"}, {}, "length"),
        ([7], {"finish_reason": "abort"}, {}, "aborted"),
        ([7], {}, {}, "aborted"),
    ],
)
def test_why_a_sample_ended(ids, last, params, reason):
    one = sample(**params)
    one.push(Delta(ids=ids, logprobs=[-1.0] * len(ids), label=3, **last), EOS)
    assert one.ids == ids
    assert (one.stop_reason or "aborted") == reason


def test_labels_follow_each_step():
    one = sample()
    for version in (0, 0, 4, 4, 4, 6):
        one.push(Delta(ids=[1], logprobs=[-1.0], label=version), EOS)
    assert Completion.join(one.ids, one.logprobs, one.labels, one.stop_reason, "").segments == (
        VersionSegment(version=0, num_tokens=2),
        VersionSegment(version=4, num_tokens=3),
        VersionSegment(version=6, num_tokens=1),
    )


def test_labels_that_come_at_the_end_are_taken_as_they_are():
    one = sample()
    one.push(Delta(ids=[1, 2], logprobs=[-1.0, -2.0]), EOS)
    one.push(Delta(ids=[3], logprobs=[-3.0], spans=((0, 1), (5, 2)), finish_reason="length"), EOS)
    assert one.labels == [(0, 1), (5, 2)]


def test_counters_follow_samples_and_requests_return_when_all_have_ended():
    table = RequestTable(EOS)
    empty = table.when_empty()
    assert empty.done()
    state = RequestState(request(num_samples=2))
    table.add(state)
    assert (table.num_waiting, table.num_running) == (2, 0)
    table.push("r/0", Delta(ids=[7], logprobs=[-1.0], label=0))
    assert (table.num_waiting, table.num_running, table.num_tokens) == (1, 1, 1)
    table.push("r/0", Delta(ids=[2], logprobs=[-1.0], label=0, finish_reason="stop"))
    assert not state.done.done()
    drained = table.when_empty()
    table.push("r/1", Delta(ids=(), logprobs=(), label=0, finish_reason="abort"))
    assert state.done.done()
    assert drained.done()
    assert (table.num_waiting, table.num_running) == (0, 0)
    assert "r" not in table
    table.push("r/1", Delta(ids=[1], logprobs=[-1.0], label=0))
    assert table.num_tokens == 2


def drawn(table, sample_id, **changes):
    table.push(sample_id, Delta(ids=[7], logprobs=[-1.0], label=0, **changes))
    return table.num_decoding


def test_samples_are_being_decoded_only_while_their_next_token_must_come():
    table = RequestTable(EOS)
    table.add(RequestState(request(num_samples=2)))
    assert table.num_decoding == 0
    assert drawn(table, "r/0") == 0, "the step for a second token may be compiled"
    assert drawn(table, "r/0") == 1
    assert drawn(table, "r/1") == 2
    table.forget_computed()
    assert table.num_decoding == 0, "after an update every prompt is computed anew"
    assert drawn(table, "r/1") == 1
    assert drawn(table, "r/0", finish_reason="length") == 1
    assert drawn(table, "r/1", finish_reason="length") == 0


def test_a_failure_ends_one_request_or_all():
    table = RequestTable(EOS)
    first, second, third = (RequestState(request(name, num_samples=2)) for name in "abc")
    for state in (first, second, third):
        table.add(state)
    table.push("b/0", Delta(ids=[1], logprobs=[-1.0], label=0))
    table.fail("b/1", ValueError("b"))
    assert "ValueError: b" in str(second.done.exception())
    assert not table.broken
    assert not first.done.done()
    table.fail("", ValueError("all"))
    assert str(first.done.exception()) == str(third.done.exception()) == table.broken
    assert "ValueError: all" in table.broken
    assert (table.num_waiting, table.num_running) == (0, 0)


class Noted:
    """As much of vLLM and of the adapters as requests are given to: notes its calls."""

    lost = ""

    def __init__(self):
        self.added, self.aborted, self.unusable, self.params = [], [], [], []

    def add(self, sample_id, prompt, params, use):
        self.added.append((sample_id, use))
        self.params.append(params)

    def abort(self, sample_ids):
        self.aborted += sample_ids

    def number(self, adapter):
        return 7

    def mark_unusable(self, adapter, reason):
        self.unusable.append(adapter)


def test_an_adapter_of_two_versions_ends_what_uses_it_and_weights_of_two_end_all():
    noted = Noted()
    requests = Requests(noted, noted, RequestTable(EOS), noted, max_model_len=100)
    for name in ("poet", "clerk", ""):
        requests.submit(RequestState(replace(request(name or "plain"), adapter=name), [5, 6]))
    assert noted.added == [("poet/0", ("poet", 7)), ("clerk/0", ("clerk", 7)), ("plain/0", None)]
    requests.mark_unusable("poet", "the update failed half way")
    assert (noted.aborted, noted.unusable, requests.unusable) == (["poet/0"], ["poet"], "")
    requests.mark_unusable("", "the update failed half way")
    assert noted.aborted[1:] == ["poet/0", "clerk/0", "plain/0"]
    with pytest.raises(WeightSyncError, match="no usable weights: the update failed half way"):
        requests.submit(RequestState(request("next"), [5, 6]))


def test_each_sample_has_a_seed_of_its_own_and_the_room_that_its_prompt_leaves():
    noted = Noted()
    requests = Requests(noted, noted, RequestTable(EOS), noted, max_model_len=100)
    requests.submit(RequestState(request(num_samples=3, seed=7, max_tokens=500), [5, 6]))
    wanted = [vllm_params(SamplingParams(max_tokens=98), seed, EOS, 98) for seed in (7, 8, 9)]
    assert noted.params == wanted


def test_what_is_held_is_counted_by_samples_and_uses_its_adapter():
    noted = Noted()
    requests = Requests(noted, noted, RequestTable(EOS), noted, max_model_len=100)
    requests.pause("wait")
    requests.submit(RequestState(replace(request(num_samples=3), adapter="poet"), [5, 6]))
    assert (noted.added, requests.num_waiting) == ([], 3)
    assert (requests.use("poet"), requests.use("clerk")) == (True, False)


def test_a_label_says_the_version_of_the_model_or_of_an_adapter_that_was_served():
    """An adapter's tokens have the version of its own last update, or of the model's where that came later."""
    served = ServedVersions()
    labels = [served.next_label]
    for version, adapter in ((3, ""), (4, "poet"), (5, "clerk"), (6, "")):
        served.update(version, adapter)
        labels.append(served.next_label)
    assert labels == [1, 2, 3, 4, 5]
    spans = [(label, 10 + label) for label in range(5)]
    assert served.segments(spans) == [(0, 10), (3, 11), (3, 12), (3, 13), (6, 14)]
    assert served.segments(spans, "poet") == [(0, 10), (3, 11), (4, 12), (4, 13), (6, 14)]
    assert served.segments(spans, "clerk") == [(0, 10), (3, 11), (3, 12), (5, 13), (6, 14)]


def score(ids=(7, 8), temperature=1.0):
    continuations = (np.asarray([], np.int32), np.asarray(ids, np.int32))
    return ScoreRequest(
        request_id="s", prompt_ids=np.asarray([5, 6], np.int32), continuations=continuations, temperature=temperature
    )


def test_a_continuation_is_scored_as_a_part_of_a_prompt():
    (state,) = states = score_requests(score())
    assert state.prompt == [5, 6, 7, 8]
    assert vllm_params(state.request.params, 0, EOS, 9) | dict(state.changes) == {
        **vllm_params(SamplingParams(max_tokens=1, ignore_eos=True), 0, EOS, 9),
        "prompt_logprobs": 0,
    }
    notify = [None, *({token: SimpleNamespace(logprob=-float(token))} for token in (6, 7, 8))]
    scores = Delta(
        ids=[1], logprobs=[-1.0], finish_reason="length", prompt_logprobs=prompt_logprobs(notify, [5, 6, 7, 8])
    )
    state.samples[0].push(scores, EOS)
    empty, found = read_scores(score(), states)
    assert (len(empty), found.tolist(), found.dtype) == (0, [-7.0, -8.0], np.float32)


@pytest.mark.parametrize(
    ("request_", "scores", "error", "words"),
    [
        (score(temperature=0.7), True, ConfigError, "at temperature 1 only"),
        (score(), False, ConfigError, "enable_lora cannot score"),
        (score([7] * 30), True, DataError, "max_model_len is 31"),
    ],
)
def test_what_vllm_cannot_score_is_refused(request_, scores, error, words):
    capabilities = RolloutCapabilities(pause_modes=(), scores=scores)
    with pytest.raises(error, match=words):
        check_scores(request_, capabilities, vocab_size=100, max_model_len=32)
