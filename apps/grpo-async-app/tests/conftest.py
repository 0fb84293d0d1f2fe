"""A tiny model, a small data set, and the command line called in this process."""

import importlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from grpo_async_app import _cli
from offbeat_testing import CommandLine, fork_roles, tiny_model

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell has started the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

ForkedMain = Callable[[], NoReturn]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Nothing here is large enough for more, and a process with threads cannot be forked."""
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


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
[cluster]
trainer_threads = 1
rollout_threads = 1
[log]
train_generations = 100
""")
    return path


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine("grpo-async-app", _cli.main, monkeypatch, capsys)


@pytest.fixture
def forked_main() -> ForkedMain:
    """The command line for a `RunningCommand` whose processes are all forks: killed often, it imports torch once."""
    for module in ("grpo_async_app._commands", "offbeat_engine_torch", "offbeat_rollout_torch"):
        importlib.import_module(module)  # before anything forks

    def main() -> NoReturn:
        fork_roles()
        _cli.main()

    return main
