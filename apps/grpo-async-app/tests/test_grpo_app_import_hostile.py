"""Scripts that need what only a user has, scripts without end, and files that hold something else than options."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._imports.command import import_command
from offbeat_core import ConfigError, load_config
from offbeat_recipes import read_options
from offbeat_recipes._imports.shell.reading import read_shell
from offbeat_run import CommandWords

START = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/data/train.parquet "
    "actor_rollout_ref.model.path=/models/small actor_rollout_ref.rollout.n=4 data.train_batch_size=64 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=32"
)


def imported(text: str, folder: Path, *, given: str = "") -> GrpoConfig:
    (folder / "run.sh").write_text(text)
    target = folder / "run.toml"
    import_command(CommandWords(options={"out": str(target), "set": given}), "verl", str(folder / "run.sh"))
    return load_config(target, GrpoConfig)


@pytest.mark.parametrize(
    "guard",
    [
        'MODEL=${MODEL:-}\nif [ -z "$MODEL" ]; then\n  echo "set MODEL"\n  exit 1\nfi\n',
        '[ -n "${MODEL:-}" ] || { echo "set MODEL" >&2; exit 2; }\n',
        "usage() { echo usage; exit 1; }\nMODEL=${MODEL:-}\n[[ -z $MODEL ]] && usage\n",
    ],
)
def test_a_script_that_ends_for_want_of_a_variable_is_read_on(
    guard: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert imported(f"{guard}{START} trainer.total_epochs=3\n", tmp_path).data.epochs == 3
    output = capsys.readouterr().out
    assert "the script ends there; it is read on" in output
    assert "--set NAME=VALUE" in output


def test_a_script_that_has_started_something_ends_where_it_says_so() -> None:
    reading = read_shell("run a.b=1\nX=\nif [ -z $X ]; then exit 1; fi\nrun a.b=2\n")
    assert reading.commands == [["run", "a.b=1"]]
    assert read_shell("X=\nif [ -z $X ]; then exit 0; fi\nrun a.b=2\n").commands == []


@pytest.mark.parametrize(
    "loop",
    [
        'while [[ $# -gt 0 ]]; do case "$1" in --model) MODEL="$2"; shift 2 ;; *) break ;; esac; done',
        'while [ "$1" != "" ]; do case $1 in -m) shift; MODEL=$1 ;; esac; shift; done',
        'while getopts "m:" option; do case $option in m) MODEL=$OPTARG ;; esac; done',
    ],
)
def test_no_arguments_are_assumed_so_that_defaults_stand(loop: str) -> None:
    reading = read_shell(f'{loop}\nif [ -z "$MODEL" ]; then MODEL=org/default; fi\nrun a.b=$MODEL')
    assert reading.commands == [["run", "a.b=org/default"]]
    assert any("no arguments are assumed" in line for line in reading.undecided)


def test_what_is_given_stands_for_what_only_a_machine_knows(tmp_path: Path) -> None:
    script = (
        "GPUS=$(nvidia-smi -L | wc -l)\n"
        f"{START} trainer.n_gpus_per_node=$GPUS trainer.save_freq=$((GPUS * 5)) trainer.nnodes=1\n"
    )
    config = imported(script, tmp_path, given="GPUS=4")
    assert (config.engine.num_ranks, config.checkpoint.every) == (4, 20)


def test_what_is_given_and_changes_nothing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imported(f"N=2\n{START} trainer.nnodes=$N\n", tmp_path, given="N=4,M=1")
    output = capsys.readouterr().out
    assert "N=4 was given: the script sets it to 2" in output
    assert "M=1 was given: the script does not use it" in output


@pytest.mark.parametrize("start", ['ssh node1 "TEXT"', "sbatch --wrap='TEXT'", 'tmux send-keys -t 0 "TEXT" Enter'])
def test_a_command_in_one_word_of_another_is_read(start: str, tmp_path: Path) -> None:
    command = f"{START} trainer.total_epochs=7"
    assert imported(start.replace("TEXT", command), tmp_path).data.epochs == 7


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("f() { f; f; }\nf", "f: more than 20000 commands, and not followed to its end"),
        ("f() { g; g; }\ng() { f; f; }\nf", "f: more than"),
        ("for a in 1 2 3 4 5 6 7 8 9; do " * 7 + ":; " + "done; " * 7, "more than 20000 commands"),
        ("i=0\nwhile [ $i -lt 9999 ]; do i=$((i+1)); done", "[ $i -lt 9999 ]: followed 100 times, and not to its end"),
        ("X=aa\n" + "X=$X$X\n" * 40, "X=$X$X: longer than 100000 characters, and not followed"),
        ("A=(1 2)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40, "more than 10000 words, and not followed"),
        ('X=\'eval "$X"\'\neval "$X"', 'eval "$X"'),
        ("if true; then " * 2000 + ":; " + "fi; " * 2000, "if true; then"),
        ("X=" + "${a:-" * 3000 + "x" + "}" * 3000, "nested too deeply"),
        ("X=" + "a" * 60 + "\n[[ $X =~ ^(a+)+b$ ]] && Y=1\n[[ $X == " + "*a" * 20 + "*b ]] && Y=1", ""),
        ("X0=$U\n" + "".join(f"X{i + 1}=$((X{i} + 1))\n" for i in range(300)), ""),
        (":(){ :|:& };:", ""),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_a_script_without_end_is_left_where_that_shows_and_the_rest_is_read(text: str, said: str) -> None:
    reading = read_shell(f"{text}\nrun a.b=1")
    assert reading.commands[-1] == ["run", "a.b=1"]
    assert said in "\n".join(reading.not_understood)


@pytest.mark.parametrize("name", ["run.sh", "run.yaml", "run.toml", "run.json"])
def test_a_mark_of_the_order_of_bytes_is_no_part_of_the_first_option(name: str, tmp_path: Path) -> None:
    texts = {
        "run.sh": "N=4\nrun a.b=$N",
        "run.yaml": "a:\n  b: 4",
        "run.toml": "a.b = 4",
        "run.json": '{"a": {"b": 4}}',
    }
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + texts[name].replace("\n", "\r\n").encode())
    assert read_options(tmp_path / name, is_hydra=True).options == {"a.b": 4}


def lists_in_lists() -> str:
    names = "abcdefgh"
    lines = [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in pairwise(names)]
    return "\n".join(["a: &a [x, x, x, x, x, x, x, x, x]", *lines])


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("run.sh", b"# " + b"x" * 2**20, "is larger than 1024 KiB"),
        ("run.yaml", b"a: 1\n" * 2**18, "is larger than 1024 KiB"),
        ("run.yaml", lists_in_lists().encode(), "at most 100000 values are read"),
        ("run.sh", b"\x7fELF\x02\x00\xd0\x00", "must be UTF-8 text"),
        ("run.sh", START.encode("utf-16"), "must be UTF-8 text"),
        ("run.sh", b"", "holds no options"),
        ("run.sh", b"cat <<EOF\n" + START.encode(), "holds no options"),
    ],
)
def test_a_file_of_something_else_is_refused_in_one_sentence(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    words: Mapping[str, str] = {"out": str(tmp_path / "new.toml")}
    with pytest.raises(ConfigError, match=said):
        import_command(CommandWords(options=dict(words)), "verl", str(tmp_path / name))
    with pytest.raises(ConfigError, match="Is a directory"):
        import_command(CommandWords(options=dict(words)), "verl", str(tmp_path))
