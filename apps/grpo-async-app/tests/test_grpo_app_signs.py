"""Signs of life: a command says what it is doing, a run how far it is, and each role's log that the role is there."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from grpo_runs import Main

from grpo_async_app._run.log.activity import RunView, describe_start
from offbeat_actors import RolePlace
from offbeat_async_policy import AsyncConfig, AsyncPolicy
from offbeat_core import RoleName
from offbeat_testing import RunningCommand, log_every_stage

STAGES = (
    "reading the configuration",
    "checking the model",
    "reading the data",
    "checking engines and devices",
    "starting the roles",
    "update 1 of 5",
    "update 5 of 5",
    "stopping the roles",
    "writing the report",
)
"""Stages of a run, in order, but for those that take no time."""


def test_a_run_says_what_it_does_and_its_roles_write_their_logs(
    forked_main: Main, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_every_stage(monkeypatch)
    monkeypatch.setattr("grpo_async_app._run.log.activity._POLL_EVERY_S", 0.002)
    run = tmp_path / "run"
    with RunningCommand(forked_main, "train", config, "--out", run) as process:
        assert process.wait() == 0, process.output
        lines = process.output.splitlines()
    assert lines[0] == "loading PyTorch ..."
    at = [next((n for n, line in enumerate(lines) if line.startswith(stage)), -1) for stage in STAGES]
    assert -1 not in at, f"{STAGES[at.index(-1)]} is not among\n" + "\n".join(lines)
    assert at == sorted(at)
    for sign in (r"starting the roles: 0 of \d ready", r"training on 4 groups", r"\d of 8 samples", r"validating \(\d"):
        assert any(re.search(sign, line) for line in lines), f"{sign} is not in\n" + "\n".join(lines)
    assert_logs(run / "logs")


def assert_logs(logs: Path) -> None:
    size = r"[\d.]+ [KMG]?i?B|[\d.]+ bytes"
    expected = {
        "trainer-0": [
            *(r"started: process \d+ on \S+, device cpu, 1 threads", r"loaded \S+ as float32 in [\d.]+ s", "ready"),
            *(rf"sent weights: version 0 to 1 engine, (?:{size}) in [\d.]+ s", r"update 1: 4 groups in [\d.]+ s"),
            *(rf"sent weights: version 1 to 1 engine, (?:{size}) in [\d.]+ s", "ended"),
        ],
        "rollout-0": [
            *(r"started: process \d+ on \S+, device cpu, 1 threads", r"loaded \S+ as float32 in [\d.]+ s", "ready"),
            *(rf"took weights: version {version}, (?:{size}) in [\d.]+ s" for version in range(6)),
            "ended",
        ],
    }
    for role, lines in expected.items():
        log = (logs / f"{role}.log").read_text()
        found = [re.search(rf"^\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d {line}$", log, re.MULTILINE) for line in lines]
        assert None not in found, f"{lines[found.index(None)]} is not in the log of {role}:\n{log}"
        at = [each.start() for each in found if each]
        assert at == sorted(at), log


def test_while_roles_start_those_that_are_late_are_named() -> None:
    ready = [RolePlace(role=RoleName("rollout", number), node="vm", state="ready") for number in range(3)]
    late = [RolePlace(role=RoleName("trainer", number), node="vm", state="starting") for number in range(9)]
    assert describe_start([*ready, *late[:1]]) == ("starting the roles", "3 of 4 ready, waiting for trainer-0")
    _, said = describe_start([*ready, *late])
    assert said == "3 of 12 ready, waiting for trainer-0, trainer-1, trainer-2, trainer-3 and 5 more"
    assert describe_start(ready)[1] == "3 of 3 ready"


def test_a_run_says_how_many_samples_it_has_and_how_far_an_update_is() -> None:
    policy = AsyncPolicy(AsyncConfig(mini_batch_size=4, staleness_threshold=1.0), num_groups=8)
    policy.actions()
    for group in range(3):
        policy.group_finished(group, 0)
    view = RunView(
        status=policy.status,
        num_updates=2,
        samples_per_group=16,
        num_tokens=12345,
        trained="",
        validated=None,
        is_saving=False,
    )
    assert view.describe() == ("update 1 of 2", "48 of 64 samples (12,345 tokens so far)")
    policy.group_finished(3, 0)
    policy.actions()
    training = replace(view, status=policy.status, trained="8 of 64 sequences", validated=(8, 32), num_tokens=0)
    said = "training on 4 groups (8 of 64 sequences), 0 of 64 samples, validating (8 of 32)"
    assert training.describe() == ("update 1 of 2", said)
