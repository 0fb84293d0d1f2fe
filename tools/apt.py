"""Installs a package of Debian where that is allowed: as root, on a machine that is thrown away (CI=true)."""

import os
import shutil
import subprocess
import sys


def may_install() -> bool:
    """Return whether this is a throw-away Debian machine on which we are allowed to install a package."""
    return os.environ.get("CI") == "true" and os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(package: str) -> None:
    """Install a package. Output goes to stderr, because stdout carries the path of what was looked for."""
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", package]):
        subprocess.run(command, check=True, env=quiet, stdout=sys.stderr, stdin=subprocess.DEVNULL, timeout=600)
