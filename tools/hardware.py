"""Tests that need a device: which packages have some, whether the device is here, and whether anything really ran.

A package declares a device in its pyproject.toml, with a command that succeeds where the device is:

    [tool.offbeat.hardware]
    cuda = "nvidia-smi -L"

and keeps the tests in `tests/cuda/`. The nox session `hardware(mesh-cuda)` is then listed everywhere, skipped with
the reason where the command fails, and failed where the device is present but no test passed.
"""

import shlex
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from workspace import Package


@dataclass(frozen=True, kw_only=True)
class HardwareTests:
    """The tests of one package for one device.

    Args:
        package: whose they are.
        device: name of the device and of the folder under tests/.
        probe: command that succeeds where the device is.
    """

    package: Package
    device: str
    probe: str

    @property
    def key(self) -> str:
        """Return the name of the session's parameter."""
        return f"{self.package.key}-{self.device}"

    @property
    def folder(self) -> Path:
        """Return the folder of the tests."""
        return self.package.folder / "tests" / self.device


def hardware_tests(found: Iterable[Package]) -> list[HardwareTests]:
    """Return what the packages declare."""
    return [
        HardwareTests(package=package, device=device, probe=probe)
        for package in found
        for device, probe in package.metadata.get("tool", {}).get("offbeat", {}).get("hardware", {}).items()
    ]


def why_absent(tests: HardwareTests) -> str | None:
    """Return None where the device is present, else the reason to skip."""
    try:
        done = subprocess.run(shlex.split(tests.probe), capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        return f"no {tests.device} here: `{tests.probe}` is not installed"
    if done.returncode == 0:
        return None
    said = (done.stderr or done.stdout).strip().splitlines()
    return f"no {tests.device} here: `{tests.probe}` says {said[-1] if said else 'nothing'!r}"


def num_passed(junit: Path) -> int:
    """Count the tests that passed according to a JUnit file: neither skipped nor failed."""
    suites = ElementTree.parse(junit).getroot().iter("testsuite")
    return sum(
        int(suite.get("tests", 0)) - sum(int(suite.get(kind, 0)) for kind in ("skipped", "failures", "errors"))
        for suite in suites
    )
