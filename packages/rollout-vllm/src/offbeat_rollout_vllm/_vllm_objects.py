"""Requests checked, and their sampling parameters in vLLM's words. Pure: a dict, so that nothing is imported."""

from typing import Any, Final

import numpy as np

from offbeat_types import ConfigError, DataError, GenerateRequest, SamplingParams

MIN_TEMPERATURE: Final = 0.01
"""vllm 0.32.0, vllm/sampling_params.py, _MAX_TEMP."""
BITS_64: Final = (1 << 64) - 1


def check_request(
    request: GenerateRequest, vocab_size: int, max_model_len: int, image_token_id: int | None = None
) -> None:
    """Refuse a request that cannot be served.

    Raises:
        ConfigError: a sampling parameter is out of bounds, or vLLM means something else by the combination.
        DataError: the prompt is empty, holds unknown ids, leaves no room, or has placeholders of images it lacks.
    """
    request.check(vocab_size, max_model_len)
    _check_meaning(request.params)
    places = 0 if image_token_id is None else np.count_nonzero(np.asarray(request.prompt_ids) == image_token_id)
    if places and not request.images:
        raise DataError(
            f"request {request.request_id!r}: the prompt holds {places} placeholder tokens of images (id "
            f"{image_token_id}) and the request no image; put the images into it, or leave the tokens out"
        )


def _check_meaning(params: SamplingParams) -> None:
    """Refuse what vLLM means otherwise."""
    if 0 < params.temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"sampling parameter temperature must be 0, or at least {MIN_TEMPERATURE}: vLLM raises what lies between "
            f"to that without a word, got {params.temperature!r}"
        )
    if params.min_p > 0 and params.top_p < 1 and params.temperature > 0:
        raise ConfigError(
            f"min_p = {params.min_p} and top_p = {params.top_p} together mean something else in vLLM, which cuts by "
            "min_p first; use one of them"
        )


def vllm_params(params: SamplingParams, seed: int, eos_ids: frozenset[int], room: int) -> dict[str, Any]:
    """Arguments for vLLM's SamplingParams, for one sample of a group.

    End-of-sequence ids are given as stop tokens, so that they are those of the model folder in every release of vLLM,
    and the last token tells why a sample ended.

    Args:
        params: of the request.
        seed: of this sample.
        eos_ids: the model's.
        room: tokens that fit behind the prompt.
    """
    stops = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
    found: dict[str, Any] = {
        "n": 1,
        "max_tokens": min(params.max_tokens, room),
        "temperature": params.temperature,
        "logprobs": 0,  # of the sampled token alone
        "ignore_eos": True,
        "stop_token_ids": sorted(stops),
        "detokenize": bool(params.stop),
        "seed": mix_seed(seed),
    }
    if params.temperature > 0:
        found |= {"top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p}
    if params.stop:
        # Special tokens count as text here, so that "<|im_end|>" can stop a sample.
        found |= {"stop": list(params.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
    return found


def mix_seed(seed: int) -> int:
    """A number in [0, 2^63) that differs in its low bits wherever `seed` differs.

    vLLM takes -1 for no seed, and torch's generator on a CPU starts from the low 32 bits only, so that seeds which
    differ by 2^32 would sample alike.

    Source: splitmix64, Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195; constants of variant 13.
    """
    mixed = (seed * 0x9E3779B97F4A7C15) & BITS_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & BITS_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & BITS_64
    return (mixed ^ (mixed >> 31)) >> 1
