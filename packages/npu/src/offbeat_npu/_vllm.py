"""vLLM on NPUs: a platform plugin of vLLM, vllm-ascend, which rollout-vllm needs no other code for than these options.

Source: vllm_ascend 0.18.0 (wheel), vllm_ascend/envs.py, ascend_config.py, platform.py, worker/worker.py.
"""

import difflib
from collections.abc import Mapping
from typing import Any, Final

from offbeat_types import BackendError, ConfigError

RELEASES: Final[Mapping[str, str]] = {
    "0.7": "2.5",
    "0.9": "2.5",
    "0.11": "2.7",
    "0.13": "2.8",
    "0.18": "2.9",
}
"""Releases of vllm-ascend, whose number is that of their vllm, and the torch each was built for."""

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


def engine_options(additional: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Options for `rollout.options` of rollout-vllm on NPUs.

    Args:
        additional: settings of the plugin, by its names.

    Raises:
        ConfigError: a name it does not read, with the nearest it does.
    """
    for name in additional or {}:
        if name not in ADDITIONAL:
            near = difflib.get_close_matches(name, ADDITIONAL, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; it reads {', '.join(sorted(ADDITIONAL))}"
            raise ConfigError(f"vllm-ascend has no setting {name!r}{hint}")
    return {"enable_sleep_mode": True, "additional_config": {"refresh": True, **(additional or {})}}


def engine_environment() -> dict[str, str]:
    """Variables that an engine whose weights change while it runs must be started with.

    VLLM_ASCEND_ENABLE_NZ=0: weights keep the layout they are loaded in. In the platform's own block format
    (FRACTAL_NZ) an update would write a plain matrix where blocks are expected.
    """
    return {"VLLM_ASCEND_ENABLE_NZ": "0"}
