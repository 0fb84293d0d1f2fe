"""Needs of NPUs: of a machine and of vLLM, which of them are here, and which do not go together.

Reads files and metadata only: it works where torch_npu does not import.

Source: torch_npu 2.13.0, torch_npu/utils/collect_env.py (CANN's version), its README (versions that match); ray 2.60,
ray/_private/accelerators/npu.py (device files); vllm_ascend 0.18.0 (wheel), vllm_ascend/envs.py, ascend_config.py,
platform.py, worker/worker.py.
"""

import difflib
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from offbeat_core import BackendError, ConfigError, EngineNeeds
from offbeat_npu._runtime import INSTALL

RAY_RESOURCE: Final = "NPU"
"""Ray's resource of one device. Source: ray 2.60, ray/_private/accelerators/npu.py."""

VISIBLE_DEVICES: Final = "ASCEND_RT_VISIBLE_DEVICES"
"""Environment variable that lists the devices a process sees. Source: as above, and CANN's runtime."""


def visible_devices(indices: Sequence[int]) -> dict[str, str]:
    """Environment of a process that is to see these of this process's devices only; nothing where none are named."""
    if not indices:
        return {}
    seen = os.environ.get(VISIBLE_DEVICES, "")
    names = seen.split(",") if seen else [str(number) for number in range(max(indices) + 1)]
    if max(indices) >= len(names):
        raise ConfigError(
            f"devices {', '.join(map(str, indices))} are asked for, counted from 0, and {VISIBLE_DEVICES}={seen} shows "
            f"this process {len(names)}: name a first one that leaves enough, or show it more"
        )
    return {VISIBLE_DEVICES: ",".join(names[index] for index in indices)}


RELEASES: Final[Mapping[str, str]] = {"0.7": "2.5", "0.9": "2.5", "0.11": "2.7", "0.13": "2.8", "0.18": "2.9"}
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
    """Return what vLLM needs on NPUs: its plugin vllm-ascend, which rollout-vllm needs no code for: it asks the device.

    `VLLM_ASCEND_ENABLE_NZ=0`: weights keep the layout they are loaded in. In the platform's own block format
    (FRACTAL_NZ) an update would write a plain matrix where blocks are expected. `refresh`: the plugin reads its
    settings anew for a second engine in the process.
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


CANN_HOMES: Final = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
DRIVER: Final = Path("/usr/local/Ascend/driver/version.info")
OLDEST_CANN: Final = (8, 5)
"""The published table ends at torch_npu 2.12 with CANN 8.5.0; 2.13 needs that or a newer one."""
LIBRARIES: Final = ("torch", "torch-npu", "vllm", "vllm-ascend", "mindspeed", "megatron-core")


def examine_environment(
    *, environment: dict[str, str] | None = None, driver: Path = DRIVER, devices: Path = Path("/dev")
) -> list[tuple[str, str]]:
    """Rows of (what, finding), each finding with what to do where something is missing.

    Args:
        environment: variables; None for those of this process.
        driver: the driver's version file.
        devices: folder of device files.
    """
    variables = dict(os.environ) if environment is None else environment
    versions = {name: found for name in LIBRARIES if (found := _version(name))}
    return [
        ("npu driver", _driver(driver)),
        ("npu devices", _devices(devices)),
        ("npu CANN", _cann(variables)),
        ("npu torch-npu", _torch_npu(versions)),
        *([("npu vllm-ascend", _vllm_ascend(versions))] if "vllm-ascend" in versions else []),
        *([("npu mindspeed", _mindspeed(versions))] if "mindspeed" in versions else []),
    ]


NOTHING_INSTALLED: Final = "nothing installed for it, which only a machine with an Ascend NPU needs (docs/npu.md)"


def has_npu_software() -> bool:
    """Return whether this machine has anything of an NPU: driver, device files, CANN or torch-npu."""
    is_set = any(os.environ.get(name) for name in CANN_HOMES)
    return is_set or DRIVER.is_file() or any(Path("/dev").glob("davinci*")) or bool(_version("torch-npu"))


def cann_version(home: Path) -> str:
    """Version of the CANN toolkit under `home`; "" where no file says it."""
    for info in sorted(home.rglob("ascend_*_install.info")):
        found = re.search(r"^version=(\S+)", info.read_text(errors="replace"), re.MULTILINE)
        if found:
            return found[1]
    return ""


def _driver(info: Path) -> str:
    if info.is_file():
        found = re.search(r"^Version=(\S+)", info.read_text(errors="replace"), re.MULTILINE | re.IGNORECASE)
        return found[1] if found else "installed, version unknown"
    return "missing: install the NPU driver and firmware" + (
        ", though npu-smi is here" if shutil.which("npu-smi") else ""
    )


def _devices(folder: Path) -> str:
    found = [path.name for path in folder.glob("davinci*") if path.name.removeprefix("davinci").isdecimal()]
    return f"{len(found)} here" if found else f"none: no {folder}/davinci0"


def _cann(variables: dict[str, str]) -> str:
    homes = [(name, Path(variables[name])) for name in CANN_HOMES if variables.get(name)]
    if not homes:
        return f"missing: neither {' nor '.join(CANN_HOMES)} is set; install CANN and run its set_env.sh in this shell"
    name, home = homes[0]
    if not home.is_dir():
        return f"missing: {name}={home} is no folder; run set_env.sh of the CANN that is installed"
    found = cann_version(home)
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if numbers and numbers < OLDEST_CANN:
        return f"{found}: too old, torch-npu 2.13 needs {'.'.join(map(str, OLDEST_CANN))} or newer"
    return found or f"at {home}, version unknown"


def _torch_npu(versions: dict[str, str]) -> str:
    if "torch-npu" not in versions:
        return f"not installed: {INSTALL}"
    torch_npu, torch = versions["torch-npu"], versions["torch"]
    if torch_npu.split(".")[:2] != torch.split(".")[:2]:
        wanted = ".".join(torch.split(".")[:2])
        return f"{torch_npu} beside torch {torch}: they must agree; pip install 'torch-npu=={wanted}.*'"
    return f"{torch_npu}, fits torch {torch}"


def _vllm_ascend(versions: dict[str, str]) -> str:
    try:
        check_pair(versions.get("vllm", ""), versions["vllm-ascend"])
    except BackendError as error:
        return str(error)
    return f"{versions['vllm-ascend']}, fits vllm {versions['vllm']}"


def _mindspeed(versions: dict[str, str]) -> str:
    """MindSpeed's release is that of the megatron-core it patches, as far as its branches say it.

    Source: Ascend/MindSpeed, setup.py and README.md of core_r0.14.0, 0.15.3 and 0.16.0; core_r0.17.0 says 0.12.1.
    """
    mindspeed, core = versions["mindspeed"], versions.get("megatron-core", "")
    release, wanted = (".".join(each.split(".")[:2]) for each in (mindspeed, core))
    if not core:
        return f"{mindspeed}, without megatron-core: pip install 'megatron-core=={release}.*'"
    if release != wanted:
        return (
            f"{mindspeed} beside megatron-core {core}: they must agree; in MindSpeed, check out core_r{wanted}.0, "
            "or the newest branch of that number"
        )
    return f"{mindspeed}, fits megatron-core {core}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
