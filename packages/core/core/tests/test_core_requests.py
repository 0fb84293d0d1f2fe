"""Wire types refuse parts that do not fit, and what an engine does not declare is refused whatever the engine."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_core import (
    Completion,
    ConfigError,
    DataError,
    GenerateRequest,
    LoraAdapter,
    RolloutCapabilities,
    SamplingParams,
    ScoreRequest,
    ShapeError,
    TrainSequence,
    VersionSegment,
)

IMAGE = np.zeros((2, 5, 3), np.uint8)
NOTHING = RolloutCapabilities(pause_modes=("wait",))
EVERYTHING = RolloutCapabilities(pause_modes=("wait",), multimodal=True, lora=True)


def request(**more):
    return GenerateRequest(request_id="r", prompt_ids=np.array([1], np.int32), **more)


def test_text_is_what_every_engine_takes():
    NOTHING.check(request(), "engine")
    NOTHING.check_adapter(None, "engine")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"adapter": "poet"}, "request 'r' wants the adapter 'poet', and this engine does not do lora"),
        ({"images": (IMAGE,)}, "request 'r' holds 1 image, and this engine is not multimodal"),
        ({"images": (IMAGE, IMAGE)}, "request 'r' holds 2 images, and this engine is not multimodal"),
    ],
)
def test_what_is_beyond_an_engine_is_named(more, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        NOTHING.check(request(**more), "engine")
    EVERYTHING.check(request(**more), "engine")


def test_an_update_with_an_adapter_is_refused_where_there_can_be_none():
    adapter = LoraAdapter(name="poet", scale=0.5)
    with pytest.raises(ConfigError, match="brings the adapter 'poet', and this engine does not do lora"):
        NOTHING.check_adapter(adapter, "engine")
    EVERYTHING.check_adapter(adapter, "engine")


@pytest.mark.parametrize(
    "image",
    [np.zeros((2, 5), np.uint8), np.zeros((3, 2, 5), np.uint8), np.zeros((2, 5, 3), np.float32), IMAGE[:0]],
    ids=["grey", "channels first", "float", "empty"],
)
def test_an_image_is_pixels_by_row_column_and_colour(image):
    with pytest.raises(DataError, match=re.escape(f"image 1 must be [H, W, 3] uint8, got {image.shape} {image.dtype}")):
        EVERYTHING.check(request(images=(IMAGE, image)), "engine")


@pytest.mark.parametrize(("name", "scale"), [("", 1.0), ("poet", float("nan")), ("poet", float("inf"))])
def test_an_adapter_has_a_name_and_a_scale(name, scale):
    with pytest.raises(ConfigError, match="needs a name and a finite scale"):
        LoraAdapter(name=name, scale=scale)


VOCAB_SIZE, MAX_MODEL_LEN = 50, 20


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"min_p": 2.0}, "min_p must be in"),
        ({"stop": ("",)}, "not empty"),
    ],
)
def test_unintended_sampling_is_refused(params, text):
    bad = GenerateRequest(request_id="r", prompt_ids=np.array([1], np.int32), params=SamplingParams(**params))
    with pytest.raises(ConfigError, match=text):
        bad.check(VOCAB_SIZE, MAX_MODEL_LEN)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], "at least one token"),
        ([[1, 2]], "in one dimension"),
        ([1, 50], r"must be in \[0, 50\), got 1 to 50"),
        ([-1, 3], "got -1 to 3"),
        ([1] * 20, "the prompt has 20 tokens and max_model_len is 20"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(ids, text):
    with pytest.raises(DataError, match=text):
        GenerateRequest(request_id="r", prompt_ids=np.array(ids, np.int32)).check(VOCAB_SIZE, MAX_MODEL_LEN)


def test_the_edges_are_served():
    params = SamplingParams(max_tokens=1, temperature=0.0, top_p=1.0, top_k=0, min_p=1.0)
    ids = np.array([0, 49] * 9 + [0], np.int32)
    GenerateRequest(request_id="r", prompt_ids=ids, params=params).check(VOCAB_SIZE, MAX_MODEL_LEN)


def test_what_is_scored_may_fill_the_model_and_not_be_longer():
    """A prompt leaves room for a token that is sampled; of what is scored, no token is still to come."""

    def scored(*lengths):
        continuations = tuple(np.zeros(length, np.int32) for length in lengths)
        return ScoreRequest(request_id="r", prompt_ids=np.array([1] * 5, np.int32), continuations=continuations)

    scored(3, MAX_MODEL_LEN - 5).check(VOCAB_SIZE, MAX_MODEL_LEN)
    with pytest.raises(DataError, match="prompt and continuation have 21 tokens and max_model_len is 20; raise it"):
        scored(3, MAX_MODEL_LEN - 4).check(VOCAB_SIZE, MAX_MODEL_LEN)


def completion(num_ids, num_logprobs, segments):
    return Completion(
        ids=np.zeros(num_ids, np.int32),
        logprobs=np.zeros(num_logprobs, np.float32),
        segments=tuple(VersionSegment(version=version, num_tokens=tokens) for version, tokens in segments),
        stop_reason="length",
    )


@given(segments=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=6))
def test_segments_cover_the_tokens_and_lag_counts_from_the_oldest(segments):
    num_tokens = sum(tokens for _, tokens in segments)
    made = completion(num_tokens, num_tokens, segments)
    assert made.oldest_version == min((version for version, _ in segments), default=0)


@given(sizes=st.tuples(*[st.integers(0, 6)] * 3).filter(lambda sizes: len(set(sizes)) > 1))
def test_parts_of_different_length_are_refused(sizes):
    num_ids, num_logprobs, covered = sizes
    with pytest.raises(ShapeError, match=f"got {num_ids}, {num_logprobs} and {covered}"):
        completion(num_ids, num_logprobs, [(0, covered)])


def sequence(num_ids, mask, **extras):
    return TrainSequence(
        ids=np.zeros(num_ids, np.int32),
        loss_mask=np.array(mask, dtype=np.bool_),
        extras={name: np.zeros(size, np.float32) for name, size in extras.items()},
    )


def test_a_sequence_holds_arrays_of_one_length():
    assert sequence(3, [False, True, True], advantages=3).extras["advantages"].shape == (3,)
    assert sequence(0, []).ids.shape == (0,)


def test_an_array_of_another_length_is_named():
    with pytest.raises(ShapeError, match=r"shape of ids \(3,\): got {'old_logprobs': \(2,\)}"):
        sequence(3, [False, True, True], advantages=3, old_logprobs=2)
    with pytest.raises(ShapeError, match=r"got {'loss_mask': \(2,\)}"):
        sequence(3, [False, True])


def test_the_first_token_cannot_be_learnt():
    with pytest.raises(ShapeError, match=r"loss_mask\[0\] must be False"):
        sequence(2, [True, True])


def test_wire_types_do_not_change_once_made():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5


def test_samples_without_a_seed_draw_from_another_one_each_time():
    assert [SamplingParams(seed=seed).first_seed() for seed in (0, 5)] == [0, 5]
    assert len({SamplingParams().first_seed() for _ in range(5)}) == 5
