"""Ranks on two hosts, where a host takes its own name for loopback."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ISOLATED = ["unshare", "--user", "--map-root-user", "--net", "--mount"]


def why_not() -> str:
    if not shutil.which("unshare") or not shutil.which("ip"):
        return "needs the commands unshare and ip"
    probe = subprocess.run([*ISOLATED, "ip", "link", "add", "va", "type", "veth"], capture_output=True, text=True)
    return f"no network namespaces here: {probe.stderr.strip()}" if probe.returncode else ""


def test_a_head_that_takes_its_name_for_loopback_is_reached_from_other_hosts(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    script = Path(__file__).with_name("mesh_hosts.py")
    done = subprocess.run(
        [*ISOLATED, sys.executable, str(script), tmp_path], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["10.78.0.1 of 2", "10.78.0.2 of 2"]
