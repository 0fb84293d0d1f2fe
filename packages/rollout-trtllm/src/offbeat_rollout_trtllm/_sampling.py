"""Sampling parameters in TensorRT-LLM's words."""

from collections.abc import Iterable
from typing import Any

from offbeat_types import ConfigError, SamplingParams


def to_engine_params(params: SamplingParams, *, index: int, eos_ids: Iterable[int], max_tokens: int) -> dict[str, Any]:
    """Arguments of TensorRT-LLM's SamplingParams for one sample.

    The end of sequence is given as a stop token, for then the token stays in the output; stop strings are found by the
    adapter, because the engine compares tokens and would miss a string that lies across a token border.

    Args:
        params: what was asked for, checked.
        index: of the sample: its seed is that much higher.
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
        "logprobs": 1,
        "detokenize": False,
        "add_special_tokens": False,
    }
    if params.seed is not None:
        chosen["seed"] = params.seed + index
    if params.temperature == 0:
        return chosen | {"top_k": 1, "temperature": 1.0}
    chosen["temperature"] = params.temperature
    cuts = {"top_k": params.top_k, "min_p": params.min_p, "top_p": params.top_p if params.top_p < 1 else 0}
    return chosen | {name: value for name, value in cuts.items() if value}


def check_cut(params: SamplingParams, *, allow_cut: bool) -> None:
    """Refuse a cut whose log-probabilities would be others than asked for, unless that is allowed.

    Raises:
        ConfigError: with the parameters.
    """
    is_cut = params.top_p < 1 or params.top_k > 1 or params.min_p > 0
    if params.temperature and is_cut and not allow_cut:
        raise ConfigError(
            "top_p, top_k and min_p cut the distribution, and TensorRT-LLM 1.2 gives log-probabilities before the cut: "
            "leave them out, or set the option allow_cut_sampling where the log-probabilities are not used"
        )
