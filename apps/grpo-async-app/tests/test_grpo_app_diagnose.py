"""`diagnose` names what makes log-probabilities differ, and names nothing where all is well."""

import json
from pathlib import Path

import pytest

from offbeat_testing import CommandLine, small_grpo_run, tiny_model


def diagnose(command: CommandLine, *words: object) -> dict:
    ended = command("diagnose", *words, "--format=json")
    assert ended.code in (0, 1), ended.out + ended.err
    print(ended.out)
    return json.loads(ended.out[ended.out.index("{") :])


def test_a_healthy_run_has_no_cause(command: CommandLine, config: Path) -> None:
    print(diagnose(command, config))
