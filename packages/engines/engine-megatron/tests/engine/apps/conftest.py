"""Both applications with a trainer of several ranks of megatron-core: forks of this process, which has imported it."""

import os
from importlib import import_module
from importlib.util import find_spec

import pytest

from offbeat_testing import CommandLine, forked_main, small_grpo_run, small_sft_run, tiny_model

collect_ignore_glob = [] if find_spec("megatron") and find_spec("grpo_async_app") else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Sums in one order, and a process with threads cannot be forked."""
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A model that two ranks can share along each axis."""
    return tiny_model(tmp_path_factory.mktemp("model"), hidden_size=32, num_layers=2, num_kv_heads=2)


ENGINES = ("offbeat_engine_torch", "offbeat_engine_megatron", "offbeat_rollout_torch")


@pytest.fixture(scope="session")
def sft_main():
    return forked_main("sft_app", *ENGINES)


@pytest.fixture(scope="session")
def grpo_main():
    return forked_main("grpo_async_app", *ENGINES)


def command_line(app, monkeypatch, capsys):
    """The command line, called in this process."""
    return CommandLine(app.replace("_", "-"), import_module(f"{app}._cli").main, monkeypatch, capsys)


@pytest.fixture
def sft_command(monkeypatch, capsys):
    return command_line("sft_app", monkeypatch, capsys)


@pytest.fixture
def grpo_command(monkeypatch, capsys):
    return command_line("grpo_async_app", monkeypatch, capsys)


@pytest.fixture
def sft_config(tmp_path, model):
    return small_sft_run(tmp_path, model)


@pytest.fixture
def grpo_config(tmp_path, model):
    return small_grpo_run(tmp_path, model)


@pytest.fixture
def lucky_reward(tmp_path, monkeypatch):
    """A reward that a model with random weights gets some of: the share of vowels."""
    (tmp_path / "lucky_reward.py").write_text(
        "def judge(prompt, completion):\n"
        "    return sum(letter in 'aeiou' for letter in completion) / max(len(completion), 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "--reward.name=lucky_reward:judge"
