"""Settings of this engine beyond the common ones, and the tokenizer of a model folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from tokenizers import Tokenizer

from offbeat_core import (
    CacheBudget,
    CacheNeeds,
    HeldBytes,
    ModelError,
    RolloutEngineSettings,
    read_options,
    setting,
)


@dataclass(frozen=True, kw_only=True)
class TrtllmOptions:
    """Extras of this engine, given as `RolloutEngineConfig.options`."""

    server: str = setting("", "host:port of a running engine; empty: the engine runs in this process.")
    kv_cache_fraction: float = setting(0.6, "Share of the free GPU memory for keys and values.", gt=0, le=0.95)
    reuse_blocks: bool = setting(True, "Keep keys and values of prompts that come again.")
    weights: str = setting(
        "as_stored", "as_stored, or fp8_blocks: 128 x 128 blocks in e4m3.", choices=("as_stored", "fp8_blocks")
    )
    fp8_kv_cache: bool = setting(False, "Hold keys and values in FP8.")
    bucket_bytes: int = setting(512 << 20, "Weights handed over at once.", "bytes", ge=64)
    allow_cut_sampling: bool = setting(
        False, "Allow top_p, top_k and min_p: log-probabilities are then those before the cut."
    )
    allow_unlisted_version: bool = setting(False, "Try a version of TensorRT-LLM that is not in the table.")
    start_deadline_s: float = setting(900.0, "For the engine to start.", "s", gt=0)
    call_deadline_s: float = setting(300.0, "For each answer of the engine.", "s", gt=0)
    engine_args: dict[str, Any] = setting({}, "Arguments of TensorRT-LLM's AsyncLLM, passed through.")

    @classmethod
    def parse(cls, options: dict[str, Any]) -> Self:
        """Check names, types and bounds.

        Raises:
            ConfigError: whatever is wrong.
        """
        return read_options("rollout-trtllm", cls, options)


def cache_budget(settings: RolloutEngineSettings, needs: CacheNeeds) -> CacheBudget:
    """Return what TensorRT-LLM takes of a device: a share of what the weights leave. See `CacheBudget`."""
    options = TrtllmOptions.parse(settings.options)
    left = max(needs.device_bytes - needs.weight_bytes, 0)
    advice = "a larger {0}.tensor_parallel, a smaller {0}.max_model_len, or a larger kv_cache_fraction in {0}.options"
    return CacheBudget(cache_bytes=int(options.kv_cache_fraction * left), advice=advice)


def held_bytes(settings: RolloutEngineSettings) -> HeldBytes:
    """Return what TensorRT-LLM holds in FP8. See `HeldBytes`."""
    options = TrtllmOptions.parse(settings.options)
    in_blocks = options.weights == "fp8_blocks"
    return HeldBytes(matrices=1 if in_blocks else None, cache=1 if options.fp8_kv_cache else None)


FP8_QUANTIZATION: Final = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
"""As DeepSeek-V3's config.json has it; TensorRT-LLM reads it as FP8_BLOCK_SCALES."""


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer, for stop strings and text."""
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises nothing more precise
        raise ModelError(f"{folder}: tokenizer.json is missing or unreadable: {error}") from error
