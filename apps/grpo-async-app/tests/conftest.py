"""A tiny model, a small data set, and the command line called in this process."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import offbeat_testing
from grpo_async_app import _cli
from offbeat_testing import CommandLine, small_grpo_run, tiny_model

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside it

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell has started the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Nothing here is large enough for more, and a process with threads cannot be forked."""
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    """A configuration that runs in seconds."""
    return small_grpo_run(tmp_path, model)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine("grpo-async-app", _cli.main, monkeypatch, capsys)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes a module of a user's own, by name and text, where this process and those it starts import it."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))

    def write(name: str, text: str) -> None:
        (folder / f"{name}.py").write_text(text)

    return write


@pytest.fixture
def forked_main() -> Callable[[], object]:
    """The command line for a `RunningCommand` whose processes are all forks: killed often, it imports torch once."""
    return offbeat_testing.forked_main("grpo_async_app", "offbeat_engine_torch", "offbeat_rollout_torch")
