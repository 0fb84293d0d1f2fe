"""A tiny model, a small data set, and the command line called in this process."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_async_app import _cli
from offbeat_testing import tiny_model


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [{"prompt": f"what is {n} and one?", "answer": str(n + 1)} for n in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def config(tmp_path: Path, model: Path, data: Path) -> Path:
    """A configuration that runs in seconds."""
    path = tmp_path / "small.toml"
    path.write_text(f"""
[model]
path = "{model}"
[data]
path = "{data}"
eval_size = 4
max_prompt_tokens = 64
[reward]
name = "number_match"
[rollout]
samples_per_prompt = 2
max_tokens = 8
max_model_len = 96
[engine]
learning_rate = 1e-4
[async]
mini_batch_size = 4
partial_rollout = true
[eval]
every_updates = 2
[checkpoint]
every = 2
[log]
train_generations = 100
progress_every_s = 0.5
""")
    return path


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Call the command line with words; exit code, standard output, standard error."""

    def call(*words: object) -> Ended:
        monkeypatch.setattr("sys.argv", ["grpo-async-app", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            _cli.main()
        captured = capsys.readouterr()
        return Ended(int(left.value.code or 0), captured.out, captured.err)

    return call
