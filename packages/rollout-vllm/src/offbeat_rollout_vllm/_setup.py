"""What a configuration asks for, checked against the model folder and the installed vLLM; nothing is started yet."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from offbeat_rollout_vllm._folders import ModelFolder
from offbeat_rollout_vllm._form import EngineForm
from offbeat_rollout_vllm._form_choice import choose_form
from offbeat_rollout_vllm._fp8 import FP8, block_arguments, holds_blocks, with_scales
from offbeat_rollout_vllm._options import GIB, AdapterLimits, VllmRolloutOptions, drop_expert_layouts, sleep_levels
from offbeat_rollout_vllm._torchvision import check_torchvision
from offbeat_rollout_vllm._traces import WorkerTraces
from offbeat_rollout_vllm._versions import (
    LIBRARY,
    SUPPORTED_VERSIONS,
    installed_engine,
    is_cpu_build,
    release_of,
    supported_version,
)
from offbeat_types import (
    CacheBudget,
    CacheNeeds,
    RolloutCapabilities,
    RolloutEngineConfig,
    RolloutEngineSettings,
    engine_needs,
)

_DEFAULT_SHARE: Final = 0.92
"""`gpu_memory_utilization` of vllm 0.32.0."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How one engine will be started.

    Args:
        config: what every engine gets, its path absolute or relative, without "~".
        options: parsed.
        notices: of options that were renamed or left out, and of the device.
        folder: of the model; says what an update must bring.
        limits: of adapters.
        capabilities: of the engine.
        traces: of its workers.
        form: not started.
        num_workers: it will have.
        is_fp8: updates bring FP8 blocks.
        holds_blocks: the engine holds them as blocks; else as the values that they stand for.
    """

    config: RolloutEngineConfig
    options: VllmRolloutOptions
    notices: list[str]
    folder: ModelFolder
    limits: AdapterLimits
    capabilities: RolloutCapabilities
    traces: WorkerTraces
    form: EngineForm
    num_workers: int
    is_fp8: bool
    holds_blocks: bool

    @classmethod
    def read(cls, config: RolloutEngineConfig) -> "Setup":
        """Check a configuration.

        Raises:
            BackendError: vLLM is not installed, in a version that is not supported, or beside a torchvision that fails.
            ModelError: the folder is missing or corrupt.
            ConfigError: an option or device that cannot be.
        """
        name, version = installed_engine()
        options, notices = VllmRolloutOptions.parse(config.options)
        if not options.any_version:
            supported_version(name, version)
        check_torchvision()
        path = Path(config.model_path).expanduser()
        config, folder = replace(config, model_path=str(path)), ModelFolder.read(path)
        is_cpu, limits = is_cpu_build(name, version), AdapterLimits.read(options.engine)
        if is_cpu:
            options, left_out = drop_expert_layouts(options)
            notices = [*notices, *left_out]
        traces, extra = WorkerTraces(config.trace_folder), dict[str, Any]()
        if is_blocks := holds_blocks(config, is_cpu=is_cpu):
            extra, folder = block_arguments(config, options.engine, folder), with_scales(folder)
        needs = engine_needs(LIBRARY, config, releases=(release_of(version),))
        arguments = {**needs.options, **extra, **traces.arguments}
        form, num_workers = choose_form(config, options, arguments, needs.variables, is_cpu=is_cpu)
        return cls(
            config=config,
            options=options,
            notices=[*notices, *filter(None, [needs.notice])],
            folder=folder,
            limits=limits,
            capabilities=RolloutCapabilities(
                pause_modes=("abort", "wait", "keep"),
                sleep_levels=sleep_levels(options, is_cpu=is_cpu),
                shares_prompt_prefix=bool(options.engine.get("enable_prefix_caching", True)),
                multimodal=folder.has_vision and not options.engine.get("language_model_only", False),
                lora=limits.num_adapters > 0,
                fp8_weights=True,
                scores=not limits.num_adapters,
                traces=bool(config.trace_folder),
            ),
            traces=traces,
            form=form,
            num_workers=num_workers,
            is_fp8=config.weight_format == FP8,
            holds_blocks=is_blocks,
        )


def cache_budget(settings: RolloutEngineSettings, needs: CacheNeeds) -> CacheBudget:
    """What vLLM takes of a device: a share of all of it, whatever its samples need. See `CacheBudget`.

    Source: vllm 0.32.0, vllm/config/cache.py.

    Raises:
        ConfigError: options that cannot be.
    """
    options, _ = VllmRolloutOptions.parse(settings.options)
    advice = (
        "a larger {0}.tensor_parallel, a smaller {0}.max_model_len, or a larger gpu_memory_utilization in {0}.options"
    )
    if settings.device == "cpu":
        return CacheBudget(cache_bytes=options.kv_cache_gb * GIB, advice="a smaller kv_cache_gb in {0}.options")
    limit = int(float(options.engine.get("gpu_memory_utilization", _DEFAULT_SHARE)) * needs.device_bytes)
    fixed = options.engine.get("kv_cache_memory_bytes")
    left = int(fixed) if fixed else max(limit - needs.weight_bytes, 0)
    return CacheBudget(cache_bytes=left, limit_bytes=0 if fixed else limit, advice=advice)


def notices_of(settings: RolloutEngineSettings) -> list[str]:
    """What is known to speak against settings, wherever the engine is going to run: vLLM need not be here.

    Raises:
        ConfigError: an option that cannot be on the device that they name.
    """
    needs = engine_needs(LIBRARY, settings, releases=[row.release for row in SUPPORTED_VERSIONS])
    return [needs.notice] if needs.notice else []
