"""Runs on megatron-core, which the nox session `test(grpo-async-app+engine)` has; elsewhere they are left out."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

from offbeat_testing import tiny_model

collect_ignore_glob = [] if find_spec("megatron") else ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that two ranks can share along each axis."""
    return tiny_model(tmp_path_factory.mktemp("model"), hidden_size=32, num_layers=2, num_kv_heads=2)


@pytest.fixture
def forked_main(forked_main: Callable[[], NoReturn]) -> Callable[[], NoReturn]:
    """The command line, forked from a process that has imported megatron-core."""
    import_module("offbeat_engine_megatron._megatron").load_megatron()
    return forked_main


@pytest.fixture
def lucky_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A reward that a model with random weights gets some of: the share of vowels."""
    (tmp_path / "lucky_reward.py").write_text(
        "def judge(prompt, completion):\n"
        "    return sum(letter in 'aeiou' for letter in completion) / max(len(completion), 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "--reward.name=lucky_reward:judge"
