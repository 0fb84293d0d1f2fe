"""Which releases of TensorRT-LLM this adapter was written against, and what differs between them."""

import re
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from offbeat_types import BackendError, ConfigError


@dataclass(frozen=True, kw_only=True)
class Release:
    """What the adapter must know of one series of releases.

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
    """The version of TensorRT-LLM in this environment.

    Raises:
        BackendError: there is none.
    """
    try:
        return metadata.version("tensorrt-llm")
    except metadata.PackageNotFoundError:
        raise BackendError(
            f"TensorRT-LLM is not installed here, so it serves with options.server alone; it comes with {CONTAINER}"
        ) from None


def check_same_torch() -> None:
    """See whether an engine could run in this process: its wheels pin a torch.

    Raises:
        ConfigError: no series in the table pins the torch that is here.
    """
    found, releases = metadata.version("torch"), SUPPORTED_VERSIONS.values()
    if not any(found.startswith(f"{each.torch}.") for each in releases):
        pinned = ", ".join(f"TensorRT-LLM {each.series} pins torch {each.torch}" for each in releases)
        raise ConfigError(
            f"rollout.options.server must be the host:port of an engine server: {pinned} and here is torch {found}, so "
            f"it cannot run in this process; start `python -m offbeat_rollout_trtllm.serve MODEL` in {CONTAINER}"
        )


def find_release(version: str, *, allow_unlisted: bool = False) -> Release:
    """The table's entry for an installed version.

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
