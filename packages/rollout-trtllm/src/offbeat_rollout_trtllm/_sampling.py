"""Sampling parameters in TensorRT-LLM's words."""

import os
from collections.abc import Iterable
from typing import Any, Final

from offbeat_types import ConfigError, SamplingParams

SEED_MASK: Final = (1 << 64) - 1
MAX_TOP_K: Final = 1024
"""Source: TOP_K_MAX and clampTopK in cpp/tensorrt_llm/kernels/samplingTopKKernels.h (stored 264519637)."""


def draw_seed() -> int:
    """A seed for a request that has none.

    The engine's own would come from one generator, which starts alike in every process.
    Source: generateRandomSeed in cpp/include/tensorrt_llm/layers/defaultDecodingParams.h, called by
    cpp/include/tensorrt_llm/runtime/samplingConfig.h.
    """
    return int.from_bytes(os.urandom(6), "little")


def to_engine_params(params: SamplingParams, *, seed: int, eos_ids: Iterable[int], max_tokens: int) -> dict[str, Any]:
    """Arguments of TensorRT-LLM's SamplingParams for one sample.

    top_k and top_p are always given. The C++ runtime's defaults are topK = 0 and topP = 0.0, and it takes the two
    together for greedy decoding, whatever the temperature; tensorrt_llm/sampling_params.py, which says that top_p
    defaults to 1, passes None on. topK = 0 with topP = 1 is the whole distribution.
    Source: getTopK and getTopP in cpp/include/tensorrt_llm/layers/defaultDecodingParams.h (21c8b6d4);
    regularizeTopKTopP in cpp/tensorrt_llm/kernels/samplingTopKKernels.h (stored 264519637), called by
    cpp/tensorrt_llm/layers/topKSamplingLayer.cpp (89fd9b74) and topPSamplingLayer.cpp (57fc4a8a);
    SamplingParams._get_sampling_config (a98a9061).

    The end of sequence is given as a stop token, for then the token stays in the output; stop strings are found by the
    adapter, because the engine compares tokens and would miss a string that lies across a token border.

    Args:
        params: what was asked for, checked.
        seed: of this sample; what 64 bits hold of it is used.
        eos_ids: tokens that end a sample.
        max_tokens: room there is.
    """
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
    chosen: dict[str, Any] = {
        "end_id": -1,
        "pad_id": min(eos_ids, default=0),
        "max_tokens": max_tokens,
        "stop_token_ids": sorted(ends) or None,
        "include_stop_str_in_output": True,
        "seed": seed & SEED_MASK,
        "logprobs": 1,
        "detokenize": False,
        "add_special_tokens": False,
    }
    if params.temperature == 0:
        return chosen | {"top_k": 1, "top_p": 1.0, "temperature": 1.0}
    chosen |= {"top_k": params.top_k, "top_p": params.top_p, "temperature": params.temperature}
    return chosen | ({"min_p": params.min_p} if params.min_p else {})


def check_cut(params: SamplingParams, *, allow_cut: bool) -> None:
    """Refuse a cut that the engine would change, and one that its log-probabilities do not show, if not allowed.

    Raises:
        ConfigError: with the parameters.
    """
    if params.top_k > MAX_TOP_K:
        raise ConfigError(f"top_k must be at most {MAX_TOP_K}, to which TensorRT-LLM clips it, got {params.top_k}")
    is_cut = params.top_p < 1 or params.top_k > 1 or params.min_p > 0
    if params.temperature and is_cut and not allow_cut:
        raise ConfigError(
            "top_p, top_k and min_p cut the distribution, and TensorRT-LLM 1.2 gives log-probabilities before the cut: "
            "leave them out, or set the option allow_cut_sampling where the log-probabilities are not used"
        )
