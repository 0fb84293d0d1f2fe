"""A tiny model, a few conversations, and the command line called in this process."""

import json
from pathlib import Path

import pytest

from offbeat_testing import CommandLine, tiny_model
from sft_app import _cli


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in one order: two runs that do the same work get the same bits. Children inherit it too."""
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def conversation(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"what is {number} and one?"},
        {"role": "assistant", "content": f"the answer is {number + 1}"},
        {"role": "user", "content": "and one?"},
        {"role": "assistant", "content": f"{number + 2}"},
    ]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 conversations: 4 are held out, so that 20 are learned."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": conversation(number)}) + "\n" for number in range(24)))
    return path


@pytest.fixture
def config(tmp_path: Path, model: Path, data: Path) -> Path:
    """A configuration that runs in seconds: 8 updates over 3 epochs of 20 sequences; the last update has 4."""
    path = tmp_path / "small.toml"
    path.write_text(f"""
[model]
path = "{model}"
[data]
path = "{data}"
eval_size = 4
max_sequence_tokens = 256
epochs = 3
[engine]
device = "cpu"
learning_rate = 3e-3
schedule = "cosine"
batch_size = 8
max_tokens_per_microbatch = 512
[eval]
every_updates = 3
[checkpoint]
every = 2
""")
    return path


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine("sft-app", _cli.main, monkeypatch, capsys)
