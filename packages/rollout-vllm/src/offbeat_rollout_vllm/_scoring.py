"""Scores of given tokens: vLLM tells the log-probabilities of a prompt, so a continuation is sent as part of one.

Source: vllm 0.32.0, vllm/v1/worker/gpu_model_runner.py (_get_prompt_logprobs_dict): of the logits as they are, whatever
the temperature and the logprobs_mode; with the first sampled token, so that there must be room for one;
vllm/v1/request.py: cached keys and values are not read for such a request.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from offbeat_rollout_vllm._flights import Flight
from offbeat_types import ConfigError, Floats, GenerateRequest, RolloutCapabilities, SamplingParams, ScoreRequest

PROMPT_LOGPROBS: Final = {"prompt_logprobs": 0, "max_tokens": 1}
"""Of the prompt's own tokens, and none beside."""


def check_scores(request: ScoreRequest, capabilities: RolloutCapabilities, vocab_size: int, max_model_len: int) -> None:
    """Refuse what cannot be scored.

    Raises:
        ConfigError: a temperature other than 1; an engine that has room for adapters.
        DataError: see `ScoreRequest.check`.
    """
    if not capabilities.scores:
        raise ConfigError(
            "vLLM with enable_lora cannot score: its adapters reckon with one row of logits for each request, and its "
            "worker ends when there are more; take an engine without enable_lora"
        )
    if request.temperature != 1.0:
        raise ConfigError(
            f"score request {request.request_id!r}: vLLM scores at temperature 1 only, got {request.temperature:g}; "
            "sample at 1 (rollout.temperature), or take another backend for the teacher, such as torch"
        )
    request.check(vocab_size, max_model_len - 1)
    request.check_images(capabilities, "rollout-vllm")


def score_flights(request: ScoreRequest) -> list[Flight]:
    """One flight for each continuation that has tokens."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    return [
        Flight(
            GenerateRequest(
                request_id=f"{request.request_id}/{number}",
                prompt_ids=np.concatenate([request.prompt_ids, ids]),
                params=params,
            ),
            first_seed=0,
            prompt=np.concatenate([request.prompt_ids, ids]).tolist(),
            changes=PROMPT_LOGPROBS,
        )
        for number, ids in enumerate(request.continuations)
        if len(ids)
    ]


def read_scores(request: ScoreRequest, flights: Sequence[Flight]) -> list[Floats]:
    """One [T] float32 for each continuation; those without tokens had no flight."""
    found = iter(flights)
    return [
        np.asarray(next(found).samples[0].prompt_logprobs[-len(ids) :] if len(ids) else (), np.float32)
        for ids in request.continuations
    ]


def prompt_logprobs(logprobs: Any, ids: Sequence[int]) -> list[float]:
    """Of the prompt's tokens from the second on; vLLM tells nothing of the first, and may tell of likelier ones too."""
    return [float(logprobs[place][token].logprob) for place, token in enumerate(ids) if place] if logprobs else []
