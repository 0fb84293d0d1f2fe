"""Releases of TensorRT-LLM that this adapter was written against, and what it calls of them.

What it calls is data: a contract test holds every entry to the recorded interface.
"""

import re
from dataclasses import dataclass
from importlib import import_module, metadata
from types import ModuleType
from typing import Final, NamedTuple

from offbeat_core import BackendError, ConfigError


@dataclass(frozen=True, kw_only=True)
class Release:
    """Facts that the adapter needs about one series of releases.

    Args:
        series: major and minor version.
        weight_tags: names under which its memory manager holds weights and what belongs to them.
        cache_tags: names under which it holds keys and values.
        torch: version of torch it pins.
        sleep_argument: argument of the engine that lets memory be released, and its value.
    """

    series: str
    weight_tags: tuple[str, ...]
    cache_tags: tuple[str, ...]
    torch: str
    sleep_argument: tuple[str, bool]


SUPPORTED_VERSIONS: Final = {
    "1.2": Release(
        series="1.2",
        weight_tags=(
            "sampler",
            "drafter",
            "guided_decoder",
            "spec_resource_manager",
            "model_extra",
            "executor_extra",
            "model",
            "draft_model",
        ),
        cache_tags=("kv_cache",),
        torch="2.9",
        sleep_argument=("enable_sleep", True),
    ),
}
"""By series. Source: `recorded/` beside the tests, and the table of the README."""

CONTAINER: Final = "NVIDIA's tensorrt-llm release container, tag 1.2.0 or 1.2.1"


def installed_version() -> str:
    try:
        return metadata.version("tensorrt-llm")
    except metadata.PackageNotFoundError:
        raise BackendError(
            f"TensorRT-LLM is not installed here, so it serves with options.server alone; it comes with {CONTAINER}"
        ) from None


def check_same_torch() -> None:
    """See whether an engine could run in this process: its wheels pin a torch."""
    found, releases = metadata.version("torch"), SUPPORTED_VERSIONS.values()
    if not any(found.startswith(f"{each.torch}.") for each in releases):
        pinned = ", ".join(f"TensorRT-LLM {each.series} pins torch {each.torch}" for each in releases)
        raise ConfigError(
            f"rollout.options.server must be the host:port of an engine server: {pinned} and here is torch {found}, so "
            f"it cannot run in this process; start `python -m offbeat_rollout_trtllm.serve MODEL` in {CONTAINER}"
        )


def find_release(version: str, *, allow_unlisted: bool = False) -> Release:
    """Return the table's entry for an installed version.

    Args:
        version: such as "1.2.1".
        allow_unlisted: take the newest series known for a version that is not listed.

    Raises:
        BackendError: the version is not in the table, or is a release candidate, whose interface differs from the
            release's.
    """
    parsed = re.match(r"(\d+\.\d+)\.\d+(.*)", version)
    series, suffix = parsed.groups() if parsed else ("", "")
    release = SUPPORTED_VERSIONS.get(series)
    if release is not None and not suffix.startswith(("rc", "a", "b", ".dev")):
        return release
    if allow_unlisted:
        return SUPPORTED_VERSIONS[max(SUPPORTED_VERSIONS, key=_numbers)]
    known = ", ".join(f"{each}.x" for each in SUPPORTED_VERSIONS)
    raise BackendError(
        f"TensorRT-LLM {version or 'of unknown version'} is not supported: this adapter knows the releases {known}; "
        f"use {CONTAINER}, or set allow_unlisted_version after comparing the interfaces with tools/record_api.py"
    )


def _numbers(series: str) -> tuple[int, ...]:
    return tuple(int(part) for part in series.split("."))


class Use(NamedTuple):
    """One thing of TensorRT-LLM that the adapter relies on.

    Args:
        path: source file within TensorRT-LLM's repository.
        symbol: class, function or method in it.
        names: parameters, fields, members or routes of it that we name.
        why: what for.
    """

    path: str
    symbol: str
    names: tuple[str, ...]
    why: str


_ASYNC_LLM: Final = "tensorrt_llm/_torch/async_llm.py"
_ARGS: Final = "tensorrt_llm/llmapi/llm_args.py"
_SERVER: Final = "tensorrt_llm/serve/openai_server.py"
_PROTOCOL: Final = "tensorrt_llm/serve/openai_protocol.py"
_RESULT: Final = "tensorrt_llm/executor/result.py"

USES: Final = (
    Use(_ASYNC_LLM, "AsyncLLM.__init__", ("kwargs",), "start the engine under Ray"),
    Use(_ASYNC_LLM, "AsyncLLM.__await__", (), "wait until the workers are there"),
    Use(_ASYNC_LLM, "AsyncLLM.release", ("tags",), "sleep"),
    Use(_ASYNC_LLM, "AsyncLLM.resume", ("tags",), "wake"),
    Use(_ASYNC_LLM, "AsyncLLM.collective_rpc", ("method", "args"), "call the worker extension on every rank"),
    Use("tensorrt_llm/llmapi/llm.py", "BaseLLM.generate_async", ("inputs", "sampling_params", "streaming"), "generate"),
    Use(
        "tensorrt_llm/inputs/data.py", "TokensPrompt", ("prompt_token_ids", "multi_modal_data"), "a prompt with images"
    ),
    Use("tensorrt_llm/llmapi/llm.py", "BaseLLM.shutdown", (), "close"),
    Use(
        _ARGS,
        "TorchLlmArgs",
        ("sampler_type", "load_format", "ray_worker_extension_cls", "enable_sleep"),
        "arguments of the engine",
    ),
    Use(_ARGS, "BaseLlmArgs", ("model", "dtype", "tensor_parallel_size", "trust_remote_code"), "the same"),
    Use(_ARGS, "BaseLlmArgs", ("kv_cache_config", "max_batch_size", "max_seq_len", "model_kwargs"), "the same"),
    Use(_ARGS, "BaseLlmArgs", ("skip_tokenizer_init",), "tokens go in and out"),
    Use(_ARGS, "KvCacheConfig", ("enable_block_reuse", "free_gpu_memory_fraction", "dtype"), "the cache"),
    Use(
        "tensorrt_llm/sampling_params.py",
        "SamplingParams",
        (
            "end_id",
            "pad_id",
            "max_tokens",
            "stop_token_ids",
            "include_stop_str_in_output",
            "seed",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "logprobs",
            "detokenize",
            "add_special_tokens",
        ),
        "how to choose tokens",
    ),
    Use(_RESULT, "CompletionOutput", ("token_ids", "logprobs", "finish_reason", "stop_reason"), "what was chosen"),
    Use(_RESULT, "Logprob", ("logprob",), "of the chosen token"),
    Use(_RESULT, "GenerationResult.abort", (), "end a request now"),
    Use(_RESULT, "GenerationResult.prompt_token_ids", (), "the tokens that a prompt with images was read as"),
    Use(_RESULT, "GenerationResult.__aiter__", (), "tokens as they come"),
    Use("tensorrt_llm/llmapi/rlhf_utils.py", "WorkerExtension.update_weights", ("ipc_handles",), "load a flush"),
    Use("tensorrt_llm/_torch/utils.py", "get_device_uuid", ("device_idx",), "key of a rank's handles"),
    Use(_SERVER, "OpenAIServer.__init__", ("model", "tool_parser", "server_role", "metadata_server_cfg"), "serve"),
    Use(_SERVER, "OpenAIServer", ("POST /update_weights", "POST /release_memory", "POST /resume_memory"), "control"),
    Use(_SERVER, "OpenAIServer", ("GET /version", "GET /health"), "check at start"),
    Use(_PROTOCOL, "UpdateWeightsRequest", ("weights",), "body of /update_weights"),
    Use(_PROTOCOL, "MemoryUpdateRequest", ("tags",), "body of /release_memory and /resume_memory"),
    Use(
        "tensorrt_llm/_torch/virtual_memory.py",
        "ExecutorMemoryType",
        ("SAMPLER", "DRAFTER", "GUIDED_DECODER", "SPEC_RESOURCES", "MODEL_EXTRA", "EXTRA_RESOURCES", "KV_CACHE"),
        "memory tags",
    ),
    Use(
        "tensorrt_llm/_torch/virtual_memory.py",
        "ExecutorMemoryType",
        ("MODEL_ENGINE_MAIN", "MODEL_ENGINE_DRAFT"),
        "memory tags",
    ),
)


def import_engine(module: str = "tensorrt_llm") -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise BackendError(
            f"{module} cannot be imported ({error}): run in {CONTAINER}, with this package installed in it, or "
            "set the option server to the address of an engine that runs there"
        ) from error
