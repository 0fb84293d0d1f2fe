"""Samples that are added up and counted, without an engine."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from offbeat_core import SamplingParams
from offbeat_rollout_trtllm._local_link import Delta
from offbeat_rollout_trtllm._requests import InFlight, Sample
from offbeat_rollout_trtllm._weights import WeightLoader

LONG = "never this, and never that"


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def tokens(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_what_comes_behind_a_stop_string_in_one_answer_does_not_count(tokenizer):
    ids = tokens(tokenizer, "well, never this time")
    sample = Sample(SamplingParams(stop=("never this",)), frozenset([2]), tokenizer)
    count = sample.add(Delta(ids, [-1.0] * len(ids), version=3))
    found = sample.completion()
    assert (found.stop_reason, found.text) == ("stop", "well, never this")
    assert found.ids.tolist() == ids[:count]
    assert count < len(ids)


@pytest.mark.parametrize("stops", [("!", LONG), (LONG, "!")])
def test_a_stop_string_of_many_tokens_is_found_beside_a_short_one(tokenizer, stops):
    sample = Sample(SamplingParams(stop=stops), frozenset([2]), tokenizer)
    for token in tokens(tokenizer, f"well, {LONG} either"):
        sample.add(Delta([token], [-1.0], version=3))
        if sample.ended:
            break
    assert sample.completion().text == f"well, {LONG}"


def test_a_special_token_can_stop_a_sample(tokenizer):
    ids = tokens(tokenizer, "well,<|im_end|> and more")
    sample = Sample(SamplingParams(stop=("<|im_end|>",), ignore_eos=True), frozenset(), tokenizer)
    count = sample.add(Delta(ids, [-1.0] * len(ids), version=3))
    assert sample.completion().stop_reason == "stop"
    assert tokenizer.decode(ids[:count], skip_special_tokens=False) == "well,<|im_end|>"


@pytest.mark.asyncio
async def test_an_engine_is_busy_as_long_as_all_of_its_samples_took(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("offbeat_rollout_trtllm._requests.time", SimpleNamespace(monotonic=lambda: now_s))
    flight = InFlight()
    for name, seconds in (("a", 3.0), ("b", 1.0)):
        async with flight.request(name) as aborted, flight.sampling(aborted) as may_sample:
            assert may_sample
            now_s += seconds
        now_s += 5.0  # idle
    assert flight.busy_s == 4.0


def test_the_first_samples_of_all_are_being_decoded_from_their_second_token_on():
    """Until then the engine may get its kernels ready: a watcher of tokens would take it for a stuck one."""
    flight = InFlight()
    flight.note_tokens("a/0", 1)
    flight.note_tokens("a/1", 1)
    assert flight.num_decoding == 0
    flight.note_tokens("a/0", 0)
    assert flight.num_decoding == 0
    flight.note_tokens("a/0", 1)
    assert flight.num_decoding == 2
    for sample_id in ("a/0", "a/1"):
        flight.forget_sample(sample_id)
    flight.note_tokens("b/0", 1)
    assert flight.num_decoding == 1


@pytest.mark.asyncio
async def test_a_sample_waits_until_no_reason_is_left_for_it_to():
    """As when an engine is resumed while it takes weights."""
    flight = InFlight()
    flight.shut("paused")
    flight.shut("loading")

    async def sample():
        async with flight.request("a") as aborted, flight.sampling(aborted) as may_sample:
            return may_sample, flight.num_waiting, flight.num_running

    sampling = asyncio.create_task(sample())
    for _ in range(3):
        await asyncio.sleep(0)
    flight.open("paused")
    for _ in range(3):
        await asyncio.sleep(0)
    assert (sampling.done(), flight.num_waiting, flight.num_running) == (False, 1, 0)
    flight.open("loading")
    assert await sampling == (True, 0, 1)
    assert (flight.num_waiting, flight.num_running) == (0, 0)


def test_each_flush_is_filled_up_to_a_bucket():
    nothing: Any = None
    loader = WeightLoader(nothing, nothing, nothing, bucket_bytes=64, fp8_blocks=False)
    loader._in_parts = True
    tensors = iter([(str(number), torch.zeros(4)) for number in range(10)])
    assert [len(flush) for flush in loader._flushes(tensors)] == [4, 4, 2]
