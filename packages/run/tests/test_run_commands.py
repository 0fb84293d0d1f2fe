"""What applications share around their commands: dispatch, model folders, sizes, the doctor, the served report."""

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from offbeat_run import (
    Command,
    CommandWords,
    RunFolder,
    _examine,  # its loader is replaced
    count_text,
    examine,
    inspect_model,
    new_run_folder,
    print_table,
    run_named_command,
    serve_report,
    size_text,
    whole_number,
)
from offbeat_types import INSTALL_LINES, BackendError, ConfigError, ModelError, setting


@dataclass(frozen=True, kw_only=True)
class Section:
    speed: float = setting(1.0, "How fast.", "m/s", ge=0)


@dataclass(frozen=True, kw_only=True)
class Root:
    car: Section = field(default_factory=Section)


def call(*words: str) -> list[tuple[str, ...]]:
    """Dispatch words to two commands; what was called."""
    called: list[tuple[str, ...]] = []

    def record(name: str) -> Callable[..., int]:
        return lambda sorted_words, *arguments: called.append((name, *arguments)) or 0

    commands = {
        "go": Command(record("go"), "FILE", options=("out", "seed"), overrides=True),
        "show": Command(record("show"), "RUN", options=("serve",)),
        "stop": Command(record("stop"), switches=("hard",)),
        "tow": Command(record("tow"), "CAR FILE"),
    }
    assert run_named_command(words, commands, Root) == 0
    return called


def test_a_command_gets_its_argument() -> None:
    assert call("go", "a.toml", "--out", "x", "--car.speed=2") == [("go", "a.toml")]
    assert call("show", "runs/a", "--serve", "8000") == [("show", "runs/a")]
    assert call("stop") == [("stop",)]
    assert call("stop", "--hard") == [("stop",)]
    assert call("tow", "red", "a.toml") == [("tow", "red", "a.toml")]


@pytest.mark.parametrize("words", [(), ("walk",), ("go",), ("go", "a", "b"), ("stop", "now"), ("tow", "red")])
def test_a_command_that_cannot_be_is_named(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"no such command|takes"):
        call(*words)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("show", "runs/a", "--seed", "3"), "show takes no --seed; it takes --serve"),
        (("show", "runs/a", "--car.speed=2"), "show takes no settings: got --car.speed=2; it takes --serve"),
        (("stop", "--serve", "9"), "stop takes no --serve; it takes --hard"),
        (("tow", "red", "a.toml", "--hard"), "tow takes no --hard; it takes no option"),
        (("tow", "red"), "tow takes CAR FILE: got red"),
        (("go", "a.toml", "--serve=9"), "go takes no --serve; it takes --out, --seed, --section.key"),
    ],
)
def test_an_option_that_a_command_would_ignore_is_refused(words: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        call(*words)
    assert str(refusal.value) == complaint


def test_explain_answers_instead_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--explain", "car.speed") == []
    assert "How fast." in capsys.readouterr().out


def test_a_new_run_has_a_folder_named_after_its_file() -> None:
    assert new_run_folder(CommandWords(), "sums").parent == Path("runs")
    assert new_run_folder(CommandWords(), "sums").name.startswith("sums-")
    assert new_run_folder(CommandWords(options={"out": "here"}), "sums") == Path("here")


def test_whole_numbers_are_checked() -> None:
    assert whole_number(CommandWords(options={"seed": "7"}), "seed") == 7
    with pytest.raises(ConfigError, match="--seed"):
        whole_number(CommandWords(options={"seed": "-1"}), "seed")


@pytest.mark.parametrize(("number", "text"), [(7, "7"), (789_888, "790 k"), (134_515_008, "135 M"), (8 * 10**9, "8 B")])
def test_counts_are_written_for_people(number: int, text: str) -> None:
    assert count_text(number) == text


@pytest.mark.parametrize(("size", "text"), [(10, "10 bytes"), (2048, "2 KiB"), (3 * 2**30, "3 GiB"), (2**40, "1 TiB")])
def test_sizes_are_written_for_people(size: float, text: str) -> None:
    assert size_text(size) == text


def test_brackets_in_a_table_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([("install", 'pip install "x[engine]"')])
    assert "[engine]" in capsys.readouterr().out


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file({"a": np.zeros((3, 4), np.float32)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros(5, np.float32)}, tmp_path / "two.safetensors")
    config = {"model_type": "qwen3", "vocab_size": 11, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_model_folder_is_read_from_its_headers(model: Path) -> None:
    found = inspect_model(str(model))
    assert (found.family, found.num_parameters, found.vocabulary, found.max_positions) == ("qwen3", 17, 11, 64)


@pytest.mark.parametrize("damage", ["cut short", "garbage", "no weights", "no config", "broken config"])
def test_a_damaged_model_folder_is_named(model: Path, damage: str) -> None:
    weights = model / "one.safetensors"
    actions: dict[str, Callable[[], object]] = {
        "cut short": lambda: weights.write_bytes(weights.read_bytes()[:-1]),
        "garbage": lambda: weights.write_bytes(b"\xff" * 64),
        "no weights": lambda: [path.unlink() for path in model.glob("*.safetensors")],
        "no config": lambda: (model / "config.json").unlink(),
        "broken config": lambda: (model / "config.json").write_text("{"),
    }
    actions[damage]()
    with pytest.raises(ModelError, match=str(model)):
        inspect_model(str(model))


def test_the_doctor_names_python_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INSTALL_LINES, ("offbeat.engine", "abacus"), "pip install offbeat-engine-abacus")
    found = dict(examine())
    assert "python" in found
    assert "pip install offbeat-engine-abacus" in found["engine abacus"]


def test_the_doctor_asks_an_adapter_for_the_engine_that_it_adapts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adapter:
        @classmethod
        def check_installed(cls) -> None:
            raise BackendError("no abacus here")

        @classmethod
        def count(cls) -> int:  # as a device
            return 0

    monkeypatch.setattr(_examine, "load_backend", lambda kind, name: Adapter)
    monkeypatch.setitem(INSTALL_LINES, ("offbeat.engine", "abacus"), "")
    assert dict(examine())["engine abacus"] == "no abacus here"


def test_the_report_is_served_on_loopback_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    run = RunFolder.open(tmp_path / "run", write=False)
    threading.Thread(target=serve_report, args=(run, port), daemon=True).start()
    assert b"<html" in fetch(f"http://127.0.0.1:{port}/")
    assert b"<html" in fetch(f"http://localhost:{port}/")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/../config.toml", timeout=10)
    # A page elsewhere can have its own name lead here (DNS rebinding), and would read what we answer.
    for host in (f"evil.example:{port}", "127.0.0.1", "", f"127.0.0.1:{port}.evil.example"):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/", headers={"Host": host})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request, timeout=10)


def fetch(url: str) -> bytes:
    """Read a page that may take a moment to be there."""
    for _ in range(200):
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return bytes(answer.read())
        except urllib.error.URLError:
            threading.Event().wait(0.05)
    raise AssertionError(f"{url} never answered")


@pytest.mark.parametrize("port", [0, 70000])
def test_a_port_that_cannot_be_is_refused(tmp_path: Path, port: int) -> None:
    with pytest.raises(ConfigError, match="port"):
        serve_report(RunFolder(tmp_path, None), port)
