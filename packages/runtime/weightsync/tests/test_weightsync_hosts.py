"""Two hosts, as two network namespaces with a cable between them: weights cross it; cut, it is named on both sides."""

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ISOLATED = ["unshare", "--user", "--map-root-user", "--net"]


@cache
def why_not() -> str:
    """Why there can be no namespaces here; "" if there can."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        return "needs the commands unshare and ip"
    probe = subprocess.run([*ISOLATED, "ip", "link", "add", "va", "type", "veth"], capture_output=True, text=True)
    return f"no network namespaces here: {probe.stderr.strip()}" if probe.returncode else ""


def run_hosts(fault: str) -> Any:
    if why_not():
        pytest.skip(why_not())
    script = Path(__file__).with_name("weightsync_hosts.py")
    done = subprocess.run([*ISOLATED, sys.executable, str(script), fault], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_weights_cross_from_host_to_host() -> None:
    sides = run_hosts("none")
    assert sides["trainer"]["said"] == "sent 24"
    assert sides["engine"]["said"] == f"holds {sum(range(24))}"


@pytest.mark.nightly
def test_a_cable_that_is_cut_ends_the_sync_on_both_hosts_at_their_deadlines() -> None:
    sides = run_hosts("cut")
    assert sides["trainer"]["said"].startswith("DeadlineError: weight sync of version 1: waited 4 s for rollout-0")
    assert sides["engine"]["said"].startswith(
        "DeadlineError: weight sync of version 1 at rollout-0: waited 4 s for trainer-0 (bucket "
    )
    assert max(side["seconds"] for side in sides.values()) < 60  # not after the kernel's many minutes
