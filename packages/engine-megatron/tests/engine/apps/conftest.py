"""Both applications with a trainer of several ranks of megatron-core: forks of this process, which has imported it."""

import json
import os
import signal
from importlib import import_module
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("megatron") and find_spec("grpo_async_app") else ["test_*.py"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell has started the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Sums in one order, and a process with threads cannot be forked."""
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A model that two ranks can share along each axis."""
    from offbeat_testing import tiny_model

    return tiny_model(tmp_path_factory.mktemp("model"), hidden_size=32, num_layers=2, num_kv_heads=2)


def forked(app):
    """The command line of an application for a `RunningCommand` whose processes are all forks."""
    for module in (f"{app}._commands", "offbeat_engine_torch", "offbeat_engine_megatron", "offbeat_rollout_torch"):
        import_module(module)  # before anything forks
    from offbeat_testing import fork_roles

    def main():
        fork_roles()
        import_module(f"{app}._cli").main()

    return main


@pytest.fixture(scope="session")
def sft_main():
    return forked("sft_app")


@pytest.fixture(scope="session")
def grpo_main():
    return forked("grpo_async_app")


def command_line(app, monkeypatch, capsys):
    """The command line, called in this process."""
    from offbeat_testing import CommandLine

    return CommandLine(app.replace("_", "-"), import_module(f"{app}._cli").main, monkeypatch, capsys)


@pytest.fixture
def sft_command(monkeypatch, capsys):
    return command_line("sft_app", monkeypatch, capsys)


@pytest.fixture
def grpo_command(monkeypatch, capsys):
    return command_line("grpo_async_app", monkeypatch, capsys)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def sft_config(tmp_path, model):
    """8 updates over 3 epochs of 20 conversations; the last update has 4."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"what is {number} and one?"},
                {"role": "assistant", "content": f"the answer is {number + 1}"},
            ]
        }
        for number in range(24)
    ]
    path = tmp_path / "sft.toml"
    path.write_text(f"""
[model]
path = "{model}"
[data]
path = "{write_rows(tmp_path / "chats.jsonl", rows)}"
eval_size = 4
max_sequence_tokens = 256
epochs = 3
[engine]
device = "cpu"
learning_rate = 1e-3
batch_size = 8
max_tokens_per_microbatch = 512
[eval]
every_updates = 3
[checkpoint]
every = 2
""")
    return path


@pytest.fixture
def grpo_config(tmp_path, model):
    """5 updates over 20 prompts, two samples each."""
    rows = [{"prompt": f"what is {n} and one?", "answer": str(n + 1)} for n in range(24)]
    path = tmp_path / "grpo.toml"
    path.write_text(f"""
[model]
path = "{model}"
[data]
path = "{write_rows(tmp_path / "sums.jsonl", rows)}"
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
def lucky_reward(tmp_path, monkeypatch):
    """A reward that a model with random weights gets some of: the share of vowels."""
    (tmp_path / "lucky_reward.py").write_text(
        "def judge(prompt, completion):\n"
        "    return sum(letter in 'aeiou' for letter in completion) / max(len(completion), 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "--reward.name=lucky_reward:judge"
