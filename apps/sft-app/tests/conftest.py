"""A tiny model, a run of seconds, and the command line called in this process."""

import sys
from pathlib import Path

import pytest

from offbeat_testing import CommandLine, small_sft_run, tiny_model
from sft_app import _cli

sys.path.insert(0, str(Path(__file__).parent))  # for the module beside it


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in one order: two runs that do the same work get the same bits. Children inherit it too."""
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    return small_sft_run(tmp_path, model)


@pytest.fixture
def data(config: Path) -> Path:
    return config.with_name("chats.jsonl")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine("sft-app", _cli.main, monkeypatch, capsys)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs whose processes are forks come first: what computes in this process leaves threads that no fork has."""
    forked = ("test_a_recipe_is_rehearsed", "test_a_rank_that_is_killed_is_started_again")
    items.sort(key=lambda item: not item.name.startswith(forked))
