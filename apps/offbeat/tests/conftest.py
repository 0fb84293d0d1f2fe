"""A tiny model, rows, and settings with which a run takes seconds."""

import signal
from pathlib import Path
from typing import Any

import pytest

from offbeat_testing import tiny_model

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell has started the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rows() -> list[dict[str, str]]:
    return [{"prompt": f"what is {n} and one?", "answer": str(n + 1)} for n in range(24)]


@pytest.fixture
def small() -> dict[str, Any]:
    """Settings of GRPO."""
    return {
        "rollout": {"device": "cpu", "samples_per_prompt": 2, "max_tokens": 8, "max_model_len": 2048},
        "engine": {"device": "cpu", "max_updates": 3},
        "async_": {"mini_batch_size": 4},
        "checkpoint": {"every": 1},
        "cluster": {"trainer_threads": 1, "rollout_threads": 1},
        "log": {"train_generations": 100},
    }
