"""What a machine with NPUs needs, what of it is here, and what does not belong together; for `doctor`.

Reads files and metadata only: it works where torch_npu does not import.
Source: torch_npu 2.13.0, torch_npu/utils/collect_env.py (CANN's version), its README (versions that match); ray 2.60,
ray/_private/accelerators/npu.py (device files).
"""

import os
import re
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from offbeat_npu._runtime import INSTALL
from offbeat_npu._vllm import check_pair
from offbeat_types import BackendError

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
