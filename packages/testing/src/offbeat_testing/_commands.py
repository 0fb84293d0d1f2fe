"""Promises that every application keeps about words that ask for help and about mistakes, and its first sign of life.

A mistake is one clear error, exit code 2, no traceback, nothing made.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

import pytest

from offbeat_testing._hub import HubServer


@dataclass(frozen=True)
class CommandEnded:
    """End of a command.

    Args:
        code: exit code.
        out: standard output.
        err: standard error.
    """

    code: int
    out: str
    err: str


class CommandLine:
    """Calls the command line of an application with words: `command("train", "my.toml")`.

    Args:
        program: its name.
        main: reads `sys.argv`, and leaves by SystemExit.
        monkeypatch: the test's.
        capsys: the test's.
    """

    def __init__(
        self,
        program: str,
        main: Callable[[], NoReturn],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        self.program, self._main, self._monkeypatch, self._capsys = program, main, monkeypatch, capsys

    def __call__(self, *words: object) -> CommandEnded:
        self._monkeypatch.setattr("sys.argv", [self.program, *map(str, words)])
        with pytest.raises(SystemExit) as left:
            self._main()
        captured = self._capsys.readouterr()
        return CommandEnded(int(left.value.code or 0), captured.out, captured.err)

    def refused(self, *words: object) -> str:
        """Call it with words that it must refuse: exit code 2, no traceback. Return what it says of them."""
        ended = self(*words)
        assert ended.code == 2, ended.out + ended.err
        assert "Traceback" not in ended.err
        return ended.err


def log_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands of this process and its forks write a line about each stage, however short, for a whole test.

    In a test most stages take less than the time after which a log gets a line, or than the time between two polls.
    """
    status = import_module("offbeat_run._console.status")
    for name, seconds in (("QUIET_S", 0.0), ("_QUIET_SHARE", 0.0), ("_TICK_S", 0.002)):
        monkeypatch.setattr(status, name, seconds)
    note = status.Status.doing

    def note_and_show(self: Any, stage: str, so_far: str = "") -> None:
        note(self, stage, so_far)
        self.tick()

    monkeypatch.setattr(status.Status, "doing", note_and_show)


Mistake = tuple[list[str], str]
"""Words behind `train FILE --out FOLDER`, and what the error must say."""

COMMON_MISTAKES: Final[Mapping[str, Mistake]] = {
    "no such model": (["--model.path", "/nowhere/model"], "/nowhere/model"),
    "no such data": (["--data.path", "/nowhere/data.jsonl"], "/nowhere/data.jsonl"),
    "no such device": (["--engine.device", "cuda:7"], "cuda:7"),
    "no such kind of device": (["--engine.device", "abacus"], "abacus"),
    "no such engine": (["--engine.backend", "megatron"], "offbeat-engine-megatron"),
    "no such tracker": (["--log.trackers", "wand"], "wandb"),
    "unknown section": (["--engin.seed", "1"], "engine"),
    "unknown key": (["--engine.learnin_rate", "1"], "learning_rate"),
    "wrong type": (["--engine.max_updates", "many"], "engine.max_updates"),
    "out of range": (["--engine.max_updates", "-1"], "engine.max_updates"),
    "more processes than a machine holds": (["--engine.num_ranks", "5000"], "have room for"),
    "more than a computer counts": (["--engine.max_updates", "1" + 30 * "0"], "engine.max_updates"),
    "a number of too many digits": (["--engine.max_updates", 5000 * "9"], "engine.max_updates"),
    "a rank beyond all models": (["--engine.lora_rank", "1000000000"], "engine.lora_rank"),
    "everything held out": (["--data.eval_size", "24"], "eval_size"),
    "nothing to validate on": (["--data.eval_size", "0"], "data.eval_size"),
    "never ends": (["--data.epochs", "0"], "never end"),
    "a warm-up that outlasts the run": (
        ["--engine.schedule", "linear", "--engine.warmup_steps", "9", "--engine.max_updates", "2"],
        "engine.warmup_steps = 9: the run makes 2 (engine.max_updates, data.epochs)",
    ),
    "stray word": (["--verbose"], "--verbose"),
}


class CommandConformance:
    """Subclass it in a test file, with `mistakes` of the application's own.

    Needed fixtures: `command`, a `CommandLine`; `model`, a folder in Hugging Face format; `config`, a TOML file for a
    run on that model and 24 rows of data, with validation.
    """

    mistakes: ClassVar[Mapping[str, Mistake]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "mistake" in metafunc.fixturenames:
            mistakes = {**COMMON_MISTAKES, **self.mistakes}
            metafunc.parametrize("mistake", mistakes.values(), ids=mistakes.keys())

    def test_a_mistake_is_named_and_nothing_is_made(
        self, command: CommandLine, config: Path, tmp_path: Path, mistake: Mistake
    ) -> None:
        words, said = mistake
        assert_refused(command("train", config, "--out", tmp_path / "run", *words), said)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
    def test_a_tracker_that_is_not_installed_is_named_with_its_install_line(
        self, command: CommandLine, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setitem(sys.modules, name, None)
        ended = command("train", config, "--out", tmp_path / "run", "--log.trackers", name)
        assert_refused(ended, f'pip install "offbeat-run[{name}]"')
        assert not (tmp_path / "run").exists()

    def test_a_plan_says_of_a_tracker_that_is_not_installed_what_a_run_refuses(
        self, command: CommandLine, config: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "wandb", None)
        planned = command("plan", config, "--log.trackers=wandb")
        assert planned.code == 0, planned.err
        assert "log.trackers: wandb is not installed" in " ".join(planned.out.split())
        assert "log.trackers: wandb is not installed" in command.refused("train", config, "--log.trackers=wandb")

    def test_a_plan_says_all_that_is_wrong_at_once(self, command: CommandLine, config: Path) -> None:
        wrong = ["--model.path=/nowhere", "--data.path=none.jsonl", "--engine.backend=megatorn"]
        said = command.refused("plan", config, *wrong)
        assert said.startswith("error: 3 problems\n")
        assert "model.path: no such folder: /nowhere" in said
        assert "none.jsonl does not exist" in said
        assert "'megatorn' is not installed" in said

    def test_names_of_the_hub_are_looked_up_once_nothing_else_is_wrong(
        self, command: CommandLine, config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        with HubServer() as hub:
            hub.use_in_this_process(monkeypatch, tmp_path / "cache")
            wrong = ["--model.path=Qwen/Qwen3-0.6B", "--engine.backend=megatorn"]
            assert "Qwen3" not in command.refused("plan", config, *wrong)
            assert not hub.requests
            said = command.refused("plan", config, wrong[0])
            assert "model.path: Qwen/Qwen3-0.6B: there is no such model on the Hub" in said
            said = command.refused("plan", config, "--data.path=openai/gsm8k:main/train")
            assert "data.path: openai/gsm8k:main/train: there is no such data set on the Hub" in said

    def test_init_writes_a_file_that_is_read_and_asks_for_what_is_missing(
        self, command: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115  of the test's own process
        assert "init needs --data: a data set of the Hub" in command.refused("init")
        ended = command("init", "--data", "openai/gsm8k", "--out", "first.toml")
        assert ended.code == 0, ended.err
        assert f"{command.program} train first.toml" in ended.out
        assert len((tmp_path / "first.toml").read_text().splitlines()) < 30
        assert "first.toml" in command.refused("init", "--data", "openai/gsm8k", "--out", "first.toml")

    def test_help_version_and_explain_answer_what_is_asked(self, command: CommandLine) -> None:
        of_train = command("train", "--help").out
        assert "--shrink" in of_train
        assert "exit codes: 0 success" in of_train
        assert f"{command.program} plan" not in of_train
        assert f"{command.program} plan" in command("--help").out
        assert re.fullmatch(rf"{command.program} \d+\.\d+\.\d+\n", command("--version").out)
        assert re.search(r"^  engine +The trainer\.", command("--explain").out, re.MULTILINE)

    def test_a_mistyped_command_is_answered_with_the_right_one(self, command: CommandLine) -> None:
        said = command.refused("trian", "my.toml")
        assert "no such command: trian; did you mean train? the commands are " in said
        assert "resume takes one argument, RUN, got none" in command.refused("resume")

    @pytest.mark.parametrize("words", [["plan", "nowhere.toml"], ["report", "nowhere"]])
    def test_the_first_sign_of_a_command_comes_before_torch_is_imported(
        self, command: CommandLine, words: list[str]
    ) -> None:
        line = [sys.executable, "-X", "importtime", "-m", command.program.replace("-", "_"), *words]
        ended = subprocess.run(line, capture_output=True, text=True, timeout=110)
        assert ended.returncode == 2, ended.stderr
        said = [line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()]
        assert said.index("loading PyTorch ...") < said.index("torch")
        assert not ended.stdout

    def test_no_such_file(self, command: CommandLine) -> None:
        assert_refused(command("train", "nowhere.toml"), "nowhere.toml")

    def test_broken_toml_is_shown_with_line_and_column(self, command: CommandLine, tmp_path: Path) -> None:
        (tmp_path / "broken.toml").write_text('[model]\npath = "unclosed\n')
        assert_refused(command("plan", tmp_path / "broken.toml"), "broken.toml:2:17", 'path = "unclosed')

    @pytest.mark.parametrize("text", ["[" + "a." * 10_000 + "b]\n", "a = " + "[" * 10_000], ids=["tables", "lists"])
    def test_toml_without_a_bottom_is_refused(self, command: CommandLine, tmp_path: Path, text: str) -> None:
        (tmp_path / "deep.toml").write_text(text)
        assert_refused(command("plan", tmp_path / "deep.toml"), "deep.toml")

    @pytest.mark.parametrize(
        ("key", "value"), [("num_hidden_layers", 10**9), ("num_hidden_layers", -1), ("vocab_size", "many")]
    )
    def test_sizes_that_no_model_has_are_named(
        self, command: CommandLine, config: Path, model: Path, tmp_path: Path, key: str, value: object
    ) -> None:
        odd = shutil.copytree(model, tmp_path / "odd")
        sizes = json.loads((odd / "config.json").read_text())
        (odd / "config.json").write_text(json.dumps({**sizes, key: value}))
        assert_refused(command("plan", config, "--model.path", odd), key)

    def test_a_name_longer_than_a_file_may_have_is_refused(self, command: CommandLine, config: Path) -> None:
        assert_refused(command("train", config, "--out", 300 * "x"), "File name too long")

    def test_a_cluster_beyond_all_clusters_is_refused(self, command: CommandLine, config: Path) -> None:
        assert_refused(command("plan", config, "--cluster", "1000000000x8"), "--cluster 1000000000x8")

    def test_a_corrupt_model_is_named(self, command: CommandLine, config: Path, model: Path, tmp_path: Path) -> None:
        broken = shutil.copytree(model, tmp_path / "broken")
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        assert_refused(command("plan", config, "--model.path", broken), "model.safetensors")

    def test_a_model_without_tokenizer_is_named(
        self, command: CommandLine, config: Path, model: Path, tmp_path: Path
    ) -> None:
        bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
        assert_refused(command("plan", config, "--model.path", bare), "tokenizer")

    def test_a_conversation_needs_a_chat_template(
        self, command: CommandLine, config: Path, model: Path, tmp_path: Path
    ) -> None:
        plain = shutil.copytree(model, tmp_path / "plain", ignore=shutil.ignore_patterns("chat_template*"))
        settings = plain / "tokenizer_config.json"
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": None}))
        rows = []
        for number in range(24):  # all of them different: a repeated question would be held out of training
            asked = {"role": "user", "content": f"what is {number} and one?"}
            reply = {"role": "assistant", "content": str(number + 1)}
            # As either application reads it.
            rows.append({"prompt": [asked], "answer": reply["content"], "messages": [asked, reply]})
        (tmp_path / "chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        words = ["--model.path", plain, "--data.path", tmp_path / "chat.jsonl"]
        assert_refused(command("plan", config, *words), "chat template")

    def test_an_empty_data_set_is_named(self, command: CommandLine, config: Path, tmp_path: Path) -> None:
        (tmp_path / "empty.jsonl").write_text("")
        assert_refused(command("plan", config, "--data.path", tmp_path / "empty.jsonl"), "empty.jsonl")

    def test_a_run_folder_that_exists_is_not_written_to(
        self, command: CommandLine, config: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "precious.txt").write_text("kept")
        assert_refused(command("train", config, "--out", tmp_path / "run"), "resume")
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious.txt"]

    def test_no_space_left_is_said_before_anything_starts(
        self, command: CommandLine, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        assert_refused(command("train", config, "--out", tmp_path / "run"), "no space left")

    def test_a_port_in_use_is_named(self, command: CommandLine, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "config.toml").write_text("")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            assert_refused(command("report", tmp_path / "run", "--serve", port), str(port))

    def test_resume_of_something_else_is_refused(self, command: CommandLine, tmp_path: Path) -> None:
        assert_refused(command("resume", tmp_path), "config.toml")


def assert_refused(ended: CommandEnded, *said: str) -> None:
    """Require exit code 2 and an error that says all of this, without a traceback."""
    assert ended.code == 2, ended.err
    for words in said:
        assert words in ended.err
    assert "Traceback" not in ended.err


_GRPO = """
[model]
path = "{model}"
[data]
path = "{data}"
eval_size = 4
max_prompt_tokens = 64
[reward]
name = "number_match"
[rollout]
backend = "torch"
device = "cpu"
dtype = "float32"
max_running = 64
samples_per_prompt = 2
max_tokens = 8
max_model_len = 96
[engine]
device = "cpu"
dtype = "float32"
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
"""


_SFT = """
[model]
path = "{model}"
[data]
path = "{data}"
eval_size = 4
max_sequence_tokens = 256
epochs = 3
[engine]
device = "cpu"
dtype = "float32"
learning_rate = 3e-3
schedule = "cosine"
batch_size = 8
max_tokens_per_microbatch = 512
[eval]
every_updates = 3
[checkpoint]
every = 2
"""


def small_grpo_run(folder: Path, model: Path) -> Path:
    """Write sums to learn and a configuration: 5 updates over 20 prompts, two samples each.

    Args:
        folder: `small.toml` and `sums.jsonl` go there.
        model: a Hugging Face folder, such as `tiny_model` writes.

    Returns:
        The configuration.
    """
    data, config = folder / "sums.jsonl", folder / "small.toml"
    rows = [{"prompt": f"what is {n} and one?", "answer": str(n + 1)} for n in range(24)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.write_text(_GRPO.format(model=model, data=data))
    return config


def small_sft_run(folder: Path, model: Path) -> Path:
    """Write conversations and a configuration: 8 updates over 3 epochs of 20, the last of 4; 4 more are held out.

    Args:
        folder: `sft.toml` and `chats.jsonl` go there.
        model: as in `small_grpo_run`.

    Returns:
        The configuration.
    """
    data, config = folder / "chats.jsonl", folder / "sft.toml"
    data.write_text("".join(json.dumps({"messages": _conversation(number)}) + "\n" for number in range(24)))
    config.write_text(_SFT.format(model=model, data=data))
    return config


def _conversation(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"what is {number} and one?"},
        {"role": "assistant", "content": f"the answer is {number + 1}"},
        {"role": "user", "content": "and one?"},
        {"role": "assistant", "content": f"{number + 2}"},
    ]
