"""Each mistake a user can make: one clear error, exit code 2, no traceback, nothing made."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]

MISTAKES = [
    ("unknown key", ["--engine.learnin_rate", "1"], "learning_rate"),
    ("unknown section", ["--engin.seed", "1"], "engine"),
    ("wrong type", ["--engine.batch_size", "many"], "engine.batch_size"),
    ("out of range", ["--engine.batch_size", "0"], "engine.batch_size"),
    ("no such choice", ["--engine.schedule", "cosin"], "cosine"),
    ("no such model", ["--model.path", "/nowhere/model"], "/nowhere/model"),
    ("no such data", ["--data.path", "/nowhere/data.jsonl"], "/nowhere/data.jsonl"),
    ("missing column", ["--data.messages_column", "chat"], "data.messages_column"),
    ("every row too long", ["--data.max_sequence_tokens", "4"], "data.max_sequence_tokens"),
    ("everything held out", ["--data.eval_size", "24"], "eval_size"),
    ("nothing to validate on", ["--data.eval_size", "0"], "data.eval_size"),
    ("no such device", ["--engine.device", "cuda:7"], "cuda:7"),
    ("no such kind of device", ["--engine.device", "abacus"], "abacus"),
    ("no such backend", ["--engine.backend", "megatron"], "offbeat-engine-megatron"),
    ("no such engine option", ["--engine.options", "{sharing = true}"], "sharing"),
    ("never ends", ["--data.epochs", "0"], "never end"),
    ("profile backwards", ["--profile.steps", "6:3"], "FIRST:LAST"),
    ("profile without numbers", ["--profile.steps", "some"], "FIRST:LAST"),
    ("profile after the end", ["--profile.steps", "8:9"], "8 updates"),
    ("stray word", ["--verbose"], "--verbose"),
]


@pytest.mark.parametrize(("words", "said"), [mistake[1:] for mistake in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_named_and_nothing_is_made(
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


def test_conversations_need_a_chat_template(command: Command, config: Path, model: Path, tmp_path: Path) -> None:
    plain = shutil.copytree(model, tmp_path / "plain", ignore=shutil.ignore_patterns("chat_template*"))
    settings = plain / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": None}))
    ended = command("plan", config, "--model.path", plain)
    assert ended.code == 2
    assert "chat template" in ended.err


@pytest.mark.parametrize(
    ("key", "value", "said"), [("max_position_embeddings", 16, "16 positions"), ("vocab_size", 100, "100 rows")]
)
def test_sequences_the_model_cannot_take_are_refused(
    command: Command, config: Path, model: Path, tmp_path: Path, key: str, value: int, said: str
) -> None:
    small = shutil.copytree(model, tmp_path / "small")
    settings = small / "config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), key: value}))
    ended = command("plan", config, "--model.path", small)
    assert ended.code == 2
    assert said in ended.err


def test_an_empty_data_set_is_named(command: Command, config: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    ended = command("plan", config, "--data.path", tmp_path / "empty.jsonl")
    assert ended.code == 2
    assert "empty.jsonl" in ended.err


def test_a_conversation_without_an_assistant_is_named_by_its_row(
    command: Command, config: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "asked.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    ended = command("plan", config, "--data.path", rows, "--data.eval_size=0", "--eval.every_updates=0")
    assert ended.code == 2
    assert "row 1" in ended.err
    assert "assistant" in ended.err


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


def test_a_port_in_use_is_named(command: Command, tmp_path: Path) -> None:
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
