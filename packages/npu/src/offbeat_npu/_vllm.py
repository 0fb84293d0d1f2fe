"""vLLM on NPUs: a platform plugin of vLLM, vllm-ascend, which rollout-vllm needs no code for: it asks the device.

Source: vllm_ascend 0.18.0 (wheel), vllm_ascend/envs.py, ascend_config.py, platform.py, worker/worker.py.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from offbeat_npu._visible import visible_devices
from offbeat_types import BackendError, ConfigError, EngineNeeds

RELEASES: Final[Mapping[str, str]] = {
    "0.7": "2.5",
    "0.9": "2.5",
    "0.11": "2.7",
    "0.13": "2.8",
    "0.18": "2.9",
}
"""Releases of vllm-ascend, whose number is that of their vllm, and the torch each was built for; the newest last."""

ADDITIONAL: Final = frozenset(
    {
        "SLO_limits_for_dynamic_batch",
        "ascend_compilation_config",
        "ascend_fusion_config",
        "dump_config_path",
        "enable_async_exponential",
        "enable_cpu_binding",
        "enable_kv_nz",
        "enable_mc2_hierarchy_comm",
        "enable_shared_expert_dp",
        "enable_sparse_c8",
        "eplb_config",
        "finegrained_tp_config",
        "layer_sharding",
        "multistream_overlap_gate",
        "multistream_overlap_shared_expert",
        "pa_shape_list",
        "recompute_scheduler_enable",
        "refresh",
        "weight_prefetch_config",
        "xlite_graph_config",
    }
)
"""Keys of vLLM's `additional_config` that the plugin reads."""


def check_pair(vllm: str, vllm_ascend: str) -> None:
    """Refuse versions of vllm and vllm-ascend that do not belong together.

    Raises:
        BackendError: with the version to install.
    """
    wanted = ".".join(vllm_ascend.split(".")[:2])
    if ".".join(vllm.split(".")[:2]) != wanted:
        raise BackendError(
            f"vllm-ascend {vllm_ascend} is a plugin of vllm {wanted}, and vllm {vllm or 'is not installed'} is here: "
            f"pip install 'vllm=={wanted}.*'"
        )


def needs_of_vllm(devices: Sequence[int], options: Mapping[str, Any], releases: Collection[str]) -> EngineNeeds:
    """What vLLM needs on NPUs.

    `VLLM_ASCEND_ENABLE_NZ=0`: weights keep the layout they are loaded in. In the platform's own block format
    (FRACTAL_NZ) an update would write a plain matrix where blocks are expected. `refresh`: the plugin reads its
    settings anew for a second engine in the process.

    Args:
        devices: numbers among those visible to this process; none leaves the choice to vLLM.
        options: the user's, of which `additional_config` are settings of the plugin, by its names.
        releases: of vLLM, one of which is going to be used.

    Raises:
        ConfigError: a setting that the plugin does not read, with the nearest it does, or a device that is not visible.
    """
    additional = options.get("additional_config", {})
    for name in additional:
        if name not in ADDITIONAL:
            near = difflib.get_close_matches(name, ADDITIONAL, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; it reads {', '.join(sorted(ADDITIONAL))}"
            raise ConfigError(f"vllm-ascend has no setting {name!r}{hint}")
    return EngineNeeds(
        variables={"VLLM_ASCEND_ENABLE_NZ": "0", **visible_devices(devices)},
        options={"additional_config": {"refresh": True, **additional}},
        notice=_misfit(releases),
    )


def _misfit(releases: Collection[str]) -> str:
    """Why no release of the plugin fits these releases of vLLM; "" where one does, here or as recorded."""
    try:
        here = [".".join(version("vllm-ascend").split(".")[:2])]
    except PackageNotFoundError:
        here = []
    if {*RELEASES, *here} & {*releases}:
        return ""
    newest, torch = list(RELEASES.items())[-1]
    return (
        f"vLLM runs on NPUs by its plugin vllm-ascend; the newest known one, {newest}, is for vllm {newest} on torch "
        f"{torch}, and vllm {' or '.join(releases)} is used here: until the two meet none starts; the embedded "
        'one does (backend = "torch")'
    )
