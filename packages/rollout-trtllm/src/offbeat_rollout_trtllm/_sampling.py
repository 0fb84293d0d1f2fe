"""Sampling parameters in TensorRT-LLM's words."""

from collections.abc import Iterable
from typing import Any

from offbeat_types import ConfigError, SamplingParams


def to_engine_params(
    params: SamplingParams, *, index: int, eos_ids: Iterable[int], max_tokens: int, allow_cut: bool
) -> dict[str, Any]:
    """Arguments of TensorRT-LLM's SamplingParams for one sample.

    The end of sequence is given as a stop token, for then the token stays in the output; stop strings are found by the
    adapter, because the engine compares tokens and would miss a string that lies across a token border.

    Args:
        params: what was asked for.
        index: of the sample: its seed is that much higher.
        eos_ids: tokens that end a sample.
        max_tokens: room there is.
        allow_cut: allow top_p, top_k and min_p.

    Raises:
        ConfigError: a parameter that cannot be, or a cut whose log-probabilities would be others than asked for.
    """
    check_params(params, allow_cut=allow_cut)
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


def check_params(params: SamplingParams, *, allow_cut: bool) -> None:
    """Refuse what would sample something nobody meant.

    Raises:
        ConfigError: whatever is wrong.
    """
    required = {
        "max_tokens": (params.max_tokens >= 1, "at least 1"),
        "temperature": (params.temperature >= 0, "at least 0"),
        "top_p": (0 < params.top_p <= 1, "in (0, 1]"),
        "top_k": (params.top_k >= 0, "at least 0 (0: no limit)"),
        "min_p": (0 <= params.min_p <= 1, "in [0, 1]"),
        "stop": (all(params.stop), "strings that are not empty"),
    }
    for name, (is_fine, what) in required.items():
        if not is_fine:
            raise ConfigError(f"sampling parameter {name} must be {what}, got {getattr(params, name)!r}")
    is_cut = params.top_p < 1 or params.top_k > 1 or params.min_p > 0
    if params.temperature and is_cut and not allow_cut:
        raise ConfigError(
            "top_p, top_k and min_p cut the distribution, and TensorRT-LLM 1.2 gives log-probabilities before the cut: "
            "leave them out, or set the option allow_cut_sampling where the log-probabilities are not used"
        )
