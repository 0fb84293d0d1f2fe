"""Each mistake a user can make: one clear error, exit code 2, no traceback, nothing started."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]

MISTAKES = [
    ("unknown key", ["--rollout.temprature", "1"], "temperature"),
    ("unknown section", ["--rolout.temperature", "1"], "rollout"),
    ("wrong type", ["--rollout.max_tokens", "many"], "rollout.max_tokens"),
    ("out of range", ["--rollout.temperature", "-1"], "rollout.temperature"),
    ("one sample with group advantages", ["--rollout.samples_per_prompt", "1"], "samples"),
    ("correction without effect", ["--algorithm.tis_cap", "3"], "tis_cap"),
    ("no such model", ["--model.path", "/nowhere/model"], "/nowhere/model"),
    ("no such data", ["--data.path", "/nowhere/data.jsonl"], "/nowhere/data.jsonl"),
    ("missing column", ["--data.answer_column", "solution"], "solution"),
    ("every prompt too long", ["--data.max_prompt_tokens", "2"], "too long"),
    ("no such device", ["--engine.device", "cuda:7"], "cuda:7"),
    ("no such reward", ["--reward.name", "exact_mach"], "exact_match"),
    ("no such backend", ["--rollout.backend", "vllm"], "offbeat-rollout-vllm[engine]"),
    ("no room for the completion", ["--rollout.max_tokens", "90"], "max_model_len"),
    ("never ends", ["--data.epochs", "0"], "never end"),
    ("stray word", ["--verbose"], "--verbose"),
]


@pytest.mark.parametrize(("words", "said"), [mistake[1:] for mistake in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_named_and_nothing_starts(
    command: Command, config: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    ended = command("train", config, "--out", tmp_path / "run", *words)
    assert ended.code == 2
    assert said in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "run").exists()


def test_no_such_file(command: Command) -> None:
    ended = command("train", "nowhere.toml")
    assert (ended.code, "nowhere.toml" in ended.err) == (2, True)


def test_broken_toml_is_shown_with_line_and_column(command: Command, tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text('[model]\npath = "unclosed\n')
    ended = command("plan", tmp_path / "broken.toml")
    assert ended.code == 2
    assert "broken.toml:2:17" in ended.err
    assert 'path = "unclosed' in ended.err


def test_a_corrupt_model_is_named(command: Command, config: Path, model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    ended = command("plan", config, "--model.path", broken)
    assert ended.code == 2
    assert "model.safetensors" in ended.err


def test_a_model_without_tokenizer_is_named(command: Command, config: Path, model: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    ended = command("plan", config, "--model.path", bare)
    assert ended.code == 2
    assert "tokenizer" in ended.err


def test_messages_need_a_chat_template(command: Command, config: Path, model: Path, tmp_path: Path) -> None:
    plain = shutil.copytree(model, tmp_path / "plain", ignore=shutil.ignore_patterns("chat_template*"))
    settings = plain / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": None}))
    rows = tmp_path / "chat.jsonl"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "hello"}], "answer": "1"}) + "\n")
    ended = command("plan", config, "--model.path", plain, "--data.path", rows, "--data.eval_size", "0")
    assert ended.code == 2
    assert "chat template" in ended.err


def test_an_empty_data_set_is_named(command: Command, config: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    ended = command("plan", config, "--data.path", tmp_path / "empty.jsonl")
    assert ended.code == 2
    assert "empty.jsonl" in ended.err


def test_a_run_folder_that_exists_is_not_written_to(command: Command, config: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.txt").write_text("kept")
    ended = command("train", config, "--out", tmp_path / "run")
    assert ended.code == 2
    assert "resume" in ended.err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious.txt"]


def test_no_space_left_is_said_before_anything_starts(
    command: Command, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    ended = command("train", config, "--out", tmp_path / "run")
    assert ended.code == 2
    assert "no space left" in ended.err


def test_a_port_in_use_is_named(command: Command, config: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = command("report", tmp_path / "run", "--serve", port)
    assert ended.code == 2
    assert str(port) in ended.err


def test_resume_of_something_else_is_refused(command: Command, tmp_path: Path) -> None:
    ended = command("resume", tmp_path)
    assert (ended.code, "config.toml" in ended.err) == (2, True)
