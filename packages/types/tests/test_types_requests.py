"""A request that no model can serve is refused with one error, whatever the engine."""

from typing import Any

import numpy as np
import pytest

from offbeat_types import ConfigError, DataError, GenerateRequest, SamplingParams

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
def test_sampling_that_nobody_meant_is_refused(params: dict[str, Any], text: str) -> None:
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
def test_a_prompt_that_cannot_be_served_is_refused(ids: list[Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        GenerateRequest(request_id="r", prompt_ids=np.array(ids, np.int32)).check(VOCAB_SIZE, MAX_MODEL_LEN)


def test_the_edges_are_served() -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, top_p=1.0, top_k=0, min_p=1.0)
    ids = np.array([0, 49] * 9 + [0], np.int32)
    GenerateRequest(request_id="r", prompt_ids=ids, params=params).check(VOCAB_SIZE, MAX_MODEL_LEN)
