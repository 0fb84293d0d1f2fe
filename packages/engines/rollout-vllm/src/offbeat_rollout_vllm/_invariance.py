"""The proof that a sample's numbers do not depend on the samples beside it, which vLLM promises on some devices."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np

from offbeat_core import ConfigError, GenerateRequest, Ids, SamplingParams
from offbeat_rollout_vllm._inspection import ALONE
from offbeat_rollout_vllm._requests import RequestState, Sample
from offbeat_rollout_vllm._setup import BATCH_INVARIANT

_NUM_TOKENS: Final = 16
_PROMPT_LENGTHS: Final = (6, 40, 9, 131, 17, 23, 300, 5)
"""Prompts of one block of the cache and of several; together they make decoding steps of 8 rows."""


async def check_batch_invariance(
    run: Callable[[RequestState], Awaitable[None]], vocab_size: int, max_model_len: int, num_together: int
) -> None:
    """Sample some prompts one at a time and then together, and compare tokens and log-probabilities to the bit.

    Args:
        run: has a request served.
        vocab_size: of the model.
        max_model_len: of the engine, tokens.
        num_together: samples that the engine decodes at once, at most.

    Raises:
        ConfigError: they differ.
    """
    room = max(1, max_model_len - _NUM_TOKENS)
    lengths = [min(length, room) for length in _PROMPT_LENGTHS[: max(num_together, 1)]]
    # Drawn from the middle of the vocabulary: its ends hold special tokens, such as those of images.
    ids = np.random.default_rng(0).integers(vocab_size // 4, max(vocab_size // 2, 1), sum(lengths), dtype=np.int32)
    prompts = np.split(ids, np.cumsum(lengths)[:-1])
    alone = [await _sample(run, f"alone/{number}", prompt) for number, prompt in enumerate(prompts)]
    together = await asyncio.gather(
        *(_sample(run, f"together/{number}", prompt) for number, prompt in enumerate(prompts))
    )
    num_differing = sum(
        one.ids != other.ids or one.logprobs != other.logprobs for one, other in zip(alone, together, strict=True)
    )
    if num_differing:
        raise ConfigError(
            f"options.batch_invariant ({BATCH_INVARIANT}) asks that a sample's numbers do not depend on those "
            f"beside it, and here {num_differing} of {len(alone)} samples have others alone than together; vLLM has "
            "kernels for it for CUDA devices of capability 8.0 and up, AMD Instinct and Intel XPUs: leave it out"
        )


async def _sample(run: Callable[[RequestState], Awaitable[None]], name: str, prompt: Ids) -> Sample:
    params = SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True, seed=0)
    request = GenerateRequest(request_id=f"batch-invariance/{name}", prompt_ids=prompt, params=params)
    state = RequestState(request, prompt.tolist(), ALONE)
    await run(state)
    return state.samples[0]
