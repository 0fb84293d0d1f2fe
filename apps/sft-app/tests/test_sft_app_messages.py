"""Rows that the chosen loss cannot learn from are answered with what to do; a plan counts the rows that there are."""

import json
import re
from pathlib import Path

import pytest

from offbeat_testing import CommandLine


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("dpo", "no column 'chosen', it has messages; the loss compares two answers to one prompt, so each row needs"),
        ("kto", "no column 'prompt', it has messages; the loss learns from rated answers, so each row needs"),
    ],
)
def test_conversations_are_no_preferences_and_the_error_says_what_is_needed(
    command: CommandLine, config: Path, tmp_path: Path, loss: str, said: str
) -> None:
    chats = tmp_path / "conversations.jsonl"
    messages = [{"role": "user", "content": "2 + 3 ="}, {"role": "assistant", "content": "5"}]
    chats.write_text(8 * (json.dumps({"messages": messages}) + "\n"))
    error = command.refused("plan", config, f"--data.path={chats}", f"--preference.loss={loss}")
    assert said in error
    assert "leave out section preference" in error
    assert "to one of them" not in error


def test_a_plan_bounds_memory_by_the_rows_that_there_are(command: CommandLine, config: Path) -> None:
    found = [
        re.search(r"activations [\d.]+ \w+", " ".join(command("plan", config, f"--{key}={value}").out.split()))
        for key, value in {"engine.batch_size": 2, "engine.max_tokens_per_microbatch": 10**6}.items()
    ]
    assert all(found)
    assert "GiB" not in str(found)


@pytest.mark.parametrize("name", ["resume", "eval"])
def test_the_run_of_the_other_application_is_named_as_such(command: CommandLine, tmp_path: Path, name: str) -> None:
    (tmp_path / "config.toml").write_text("[model]\npath = 'm'\n")
    (tmp_path / "sessions.jsonl").write_text('{"command": "grpo-async-app train my.toml", "started_s": 1.0}\n')
    assert "is a run of grpo-async-app, and not of sft-app; grpo-async-app continues it" in command.refused(
        name, tmp_path
    )
