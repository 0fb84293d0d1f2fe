"""Places where pip finds wheels beside its registry, such as a CPU build of torch. uv does not read pip's settings."""

import os
import shutil
import subprocess


def find_links() -> list[str]:
    """Return pip's `find-links`, from PIP_FIND_LINKS or its configuration; empty where there is none."""
    return (os.environ.get("PIP_FIND_LINKS") or _configured()).split()


def _configured() -> str:
    """Return what `pip config` says; empty when there is no pip or no such setting."""
    pip = shutil.which("pip")
    if pip is None:
        return ""
    command = [pip, "config", "get", "global.find-links"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout.strip()
