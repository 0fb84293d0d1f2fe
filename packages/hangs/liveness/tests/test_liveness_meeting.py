"""Processes that share neither a world nor a folder meet at the monitor of the one that started them."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offbeat_liveness._network.address_book import Invitation, read_invitation
from offbeat_liveness._network.peers import Peers
from offbeat_liveness._network.side_channel import Address, ask
from offbeat_liveness._process.proc import HOST as THIS_HOST

HOST = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


def why_not() -> str:
    if not shutil.which("unshare") or not shutil.which("ip"):
        return "needs the commands unshare and ip"
    probe = subprocess.run([*HOST, "ip", "link", "add", "va", "type", "veth"], capture_output=True, text=True)
    return f"no namespaces here: {probe.stderr.strip()}" if probe.returncode else ""


def on_two_hosts(folder: Path, case: str) -> list[dict[str, Any]]:
    if reason := why_not():
        pytest.skip(reason)
    script = Path(__file__).with_name("liveness_hosts.py")
    done = subprocess.run([*HOST, sys.executable, script, folder, case], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    said: list[dict[str, Any]] = json.loads(done.stdout)
    return said


def test_a_circle_of_waits_is_named_across_hosts_that_share_no_folder(tmp_path: Path) -> None:
    driver, role = on_two_hosts(tmp_path, "driver")
    assert driver["pid"] == role["pid"]
    for said in (driver, role):
        assert said["kind"] == "wait-cycle", said["headline"]
        assert "driver waits for rollout-0 in rollout-0.generate" in said["headline"]
        assert "rollout-0 waits for driver in prompts.get" in said["headline"]
        assert said["parties"] == ["driver", "rollout-0"]
        assert not said["torch"]
    assert "10.76.0.1" in driver["listening"]
    assert set(driver["listening"]) <= {"10.76.0.1", "127.0.0.1"}  # the second for those that share its folder
    assert role["listening"] == ["10.76.0.2"]


@pytest.mark.nightly
def test_ranks_that_have_nothing_but_a_store_in_common_reach_each_other_across_hosts(tmp_path: Path) -> None:
    for said in on_two_hosts(tmp_path, "rank"):
        assert said["kind"] == "missing-member"
        assert said["headline"].startswith("rank 1 has not come to all_reduce")
        assert said["parties"] == ["rank 0", "rank 1"]


@pytest.mark.nightly
def test_a_head_that_takes_its_name_for_loopback_is_not_taken_for_dead(tmp_path: Path) -> None:
    for said in on_two_hosts(tmp_path, "head"):
        assert said["kind"] == "missing-member"
        assert said["headline"].startswith("rank 0 has not come to all_reduce")
        assert said["parties"] == ["rank 0", "rank 1"]


DRIVER = """
import json, sys
import offbeat_liveness as liveness
print(json.dumps(liveness.watch(stall_after_s=1, name="driver").invite()), flush=True)
sys.stdin.readline()
"""
ROLE = """
import sys, time
import offbeat_liveness as liveness
name, expected, other = sys.argv[1:]
monitor = liveness.watch(stall_after_s=1, name=name)
while expected not in [each.name for each in monitor._peers.others().values()]:
    time.sleep(0.02)
print("met", flush=True)
sys.stdin.readline()
with liveness.waiting("get", on=other):
    while monitor.verdict is None or monitor.verdict.kind != "wait-cycle":
        time.sleep(0.02)
print(monitor.verdict.headline, flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def running(code: str, *arguments: str, **variables: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | variables
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def resume(process: "subprocess.Popen[str]") -> None:
    assert process.stdin
    print(file=process.stdin, flush=True)


@pytest.mark.timeout(60)
def test_processes_that_have_met_know_each_other_when_the_place_where_they_met_is_gone() -> None:
    with running(DRIVER) as driver:
        variables = json.loads(line_of(driver))
        with running(ROLE, "b", "driver", "a", **variables) as second:
            assert line_of(second) == "met"
            with running(ROLE, "a", "b", "b", **variables) as first:  # the one that came first does not know of it
                assert line_of(first) == "met"
                driver.kill()
                driver.wait()
                resume(second)
                resume(first)
                for role in (first, second):
                    said = line_of(role)
                    assert "a waits for b in get" in said
                    assert "b waits for a in get" in said


@pytest.mark.timeout(60)
def test_without_the_secret_no_addresses_are_sent() -> None:
    unknown = Address(host="127.0.0.1", port=1, machine="vm", pid=1, born=0, name="unknown")
    message = {"ask": "meet", "address": vars(unknown)}
    with running(DRIVER) as driver:
        invitation = read_invitation(json.loads(line_of(driver)))
        assert invitation is not None
        assert invitation.host == "127.0.0.1"
        for secret in ("", "guess"):
            assert ask(invitation, message, secret, 5.0) is None
        reply = ask(invitation, message, invitation.secret, 5.0) or {}
        assert [each["name"] for each in reply["addresses"]] == ["unknown", "driver"]


INVITED = """
import os, subprocess, sys
import offbeat_liveness as liveness
monitor = liveness.watch_if_invited("rollout-0")
show = "import os; print([name for name in os.environ if 'SECRET' in name])"
subprocess.run([sys.executable, "-c", show], check=True)
if os.fork() == 0:
    print(liveness.watch_if_invited("rollout-1").invite()["OFFBEAT_LIVENESS_SECRET"], flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.timeout(60)
def test_what_an_invited_process_starts_does_not_get_the_secret_and_its_forks_still_meet() -> None:
    with running(DRIVER) as driver:
        variables = json.loads(line_of(driver))
        done = subprocess.run(
            [sys.executable, "-c", INVITED], env={**os.environ, **variables}, capture_output=True, text=True, timeout=50
        )
    assert done.stdout.splitlines() == ["[]", variables["OFFBEAT_LIVENESS_SECRET"]], done.stderr


def test_half_an_invitation_is_none() -> None:
    whole = Invitation("10.0.0.1", 4321, "s3cret")
    assert read_invitation(whole.variables()) == whole
    for missing in whole.variables():
        assert read_invitation({**whole.variables(), missing: ""}) is None


@pytest.mark.parametrize(("name", "is_replaced"), [("trainer-0", True), ("rank 0", False)])
def test_the_dead_give_way_to_a_process_with_their_name_unless_it_is_but_a_number(name: str, is_replaced: bool) -> None:
    """Each world has a rank 0: that of another one takes no other's place."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    peers = Peers(None, "", dict)
    with running("input()") as living:
        for pid, world in ((dead.pid, "first"), (living.pid, "second")):
            peers.learn(
                Address(host="127.0.0.1", port=1, machine=THIS_HOST, pid=pid, born=0, name=name, rank=0, world=world)
            )
        assert {each.pid for each in peers.others().values()} == {living.pid} | (set() if is_replaced else {dead.pid})
