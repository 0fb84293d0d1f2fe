"""A command gets its words, leaves with the right exit code and says one clear message."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import pytest

from offbeat_core import ConfigError, DataError, DeadlineError, OffbeatError, setting
from offbeat_run import (
    ERROR_FILE_VARIABLE,
    Command,
    CommandWords,
    EndRequests,
    Problems,
    count_text,
    load_error,
    new_run_folder,
    print_table,
    run_named_command,
    show_usage,
    size_text,
    whole_number,
)
from offbeat_run._command.command import split_arguments


def run(body, *words, **env):
    code = "import sys\nfrom offbeat_run import *\nfrom offbeat_core import *\ndef main():\n"
    code += "".join(f"    {line}\n" for line in body.splitlines()) + "run_command(main, program='app')\n"
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, env={**os.environ, **env}
    )


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("return None", 0),
        ("return 7", 7),
        ("raise ConfigError('what is wrong')", 2),
        ("raise MemoryError('what is wrong')", 2),
        ("raise PeerFailedError('rollout-0', 'what is wrong')", 3),
        ("raise DeadlineError('what is wrong', 'x', 1.0)", 4),
    ],
)
def test_the_exit_code_says_what_happened(body, code):
    done = run(body)
    assert done.returncode == code
    if code not in (0, 7):
        assert done.stderr.startswith("error: ")
        assert "what is wrong" in done.stderr
        assert "Traceback" not in done.stderr


def test_an_unexpected_error_shows_its_traceback_and_leaves_with_1():
    done = run("raise KeyError('lost')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "KeyError: 'lost'" in done.stderr
    assert "this is a bug" in done.stderr


@pytest.mark.parametrize("kind", ["ConfigError", "MemoryError", "RuntimeError"])
def test_an_error_with_words_of_a_file_is_no_command_for_the_terminal(kind):
    done = run(f"raise {kind}('no such column: \\x1b]0;owned\\x07\\x9b2J\\u202e')", OFFBEAT_TRACEBACK="1")
    assert "\\x1b]0;owned\\x07\\x9b2J\\u202e" in done.stderr
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(done.stderr)


@pytest.mark.parametrize(
    ("raised", "known"),
    [
        ("ConfigError('no such ' + os.environ['SECRET_KEY'])", ConfigError("no such ${SECRET_KEY}")),
        ("KeyError(os.environ['SECRET_KEY'])", OffbeatError("KeyError: '${SECRET_KEY}'")),
        ("DeadlineError('train', 'rollout-0', 1.5)", DeadlineError("train", "rollout-0", 1.5)),
        ("type('Own', (DataError,), {})('no rows')", DataError("no rows")),
        ("type('Own', (DataError,), {'__str__': lambda self: 'no rows'})(3)", OffbeatError("no rows")),
        ("KeyError('lost')", OffbeatError("KeyError: 'lost'")),
    ],
)
def test_the_program_that_has_started_a_command_gets_its_error(tmp_path, raised, known):
    left = tmp_path / "error.json"
    assert load_error(left) is None
    done = run(f"import os\nraise {raised}", **{ERROR_FILE_VARIABLE: str(left), "SECRET_KEY": "hush-hush-hush"})
    found = load_error(left)
    assert (type(found), str(found)) == (type(known), str(known))
    assert json.loads(left.read_text())["exit_code"] == done.returncode


ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]


@pytest.mark.parametrize("number", ENDING)
def test_every_signal_that_asks_to_end_leaves_with_130_and_the_line_that_resumes(tmp_path, number):
    body = f"import os\nwith RunFolder.create('{tmp_path}/run') as run:\n"
    body += "    run.write_text(run.config, '')\n    run.keep()\n"
    done = run(f"{body}    os.kill(os.getpid(), {int(number)})\n    import time; time.sleep(30)")
    assert done.returncode == 130
    assert done.stderr.strip() == f"interrupted; resume with: app resume {tmp_path}/run"


@pytest.mark.parametrize(
    ("first", "again", "is_repeated"),
    [
        (signal.SIGTERM, signal.SIGTERM, True),
        (signal.SIGUSR1, signal.SIGTERM, True),
        (signal.SIGTERM, signal.SIGINT, True),
        (signal.SIGINT, signal.SIGTERM, True),
        (signal.SIGINT, signal.SIGINT, False),
    ],
)
def test_a_signal_that_comes_twice_at_once_is_one_request(monkeypatch, first, again, is_repeated):
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    requests = EndRequests()
    assert not requests.is_repeated(first)
    now_s += 4.9
    assert requests.is_repeated(again) == is_repeated
    now_s += 0.1
    assert not requests.is_repeated(again)


def test_a_command_under_nohup_keeps_running_when_its_terminal_closes():
    body = "import os, signal\nos.kill(os.getpid(), signal.SIGHUP)\nprint('still runs', ending_signals())"
    code = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\nfrom offbeat_run import *\ndef main():\n"
    code += "".join(f"    {line}\n" for line in body.splitlines()) + "run_command(main, program='app')\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "still runs" in done.stdout
    assert "SIGHUP" not in done.stdout


def test_a_typed_error_shows_its_traceback_on_request():
    done = run("raise ConfigError('x')", OFFBEAT_TRACEBACK="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (f"os.kill(os.getpid(), {int(signal.SIGINT)}); time.sleep(30)", 130, "interrupted; resume with: app resume {}"),
        ("raise PeerFailedError('rollout-0', 'no memory')", 3, "resume with: app resume {}"),
        ("raise ConfigError('what is wrong')", 2, ""),
    ],
)
def test_a_run_that_ends_early_says_how_to_resume(tmp_path, fault, code, said):
    folder = tmp_path / "r"
    saved = "    with run.checkpoints.write(1): pass\n"
    begun = f"import os, time\nwith RunFolder.create({str(folder)!r}) as run:\n    run.keep()\n"
    done = run(f"{begun}{saved}    {fault}")
    assert done.returncode == code
    assert said.format(folder) in done.stderr
    assert ("resume" in done.stderr) == bool(said)
    assert "Traceback" not in done.stderr
    assert folder.is_dir()


def test_a_run_that_fails_before_its_first_checkpoint_has_nothing_to_resume(tmp_path):
    fault = "raise PeerFailedError('rollout-0', 'no memory')"
    done = run(f"with RunFolder.create({str(tmp_path / 'r')!r}) as run:\n    run.keep()\n    {fault}")
    assert done.returncode == 3
    assert "no memory" in done.stderr
    assert "resume" not in done.stderr


@pytest.mark.parametrize(
    ("fault", "code"), [(f"os.kill(os.getpid(), {int(signal.SIGINT)}); time.sleep(30)", 130), ("raise ConfigError", 2)]
)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_run_that_is_refused_or_interrupted_before_it_begins_leaves_no_folder(tmp_path, fault, code, is_there):
    folder = tmp_path / "r"
    if is_there:
        folder.mkdir()
    body = f"import os, time\nwith RunFolder.create({str(folder)!r}) as run:\n    run.write_text(run.config, '')\n"
    done = run(f"{body}    run.log('trainer-0').touch()\n    {fault}")
    assert done.returncode == code
    assert "resume" not in done.stderr
    assert list(tmp_path.rglob("*")) == ([folder] if is_there else [])


def test_what_the_terminal_cannot_show_is_escaped():
    done = run("print_text('0 → 1')\nraise ConfigError('no \u2501 here')", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stdout) == (2, "0 \\u2192 1\n")
    assert "error: no \\u2501 here" in done.stderr


def test_a_reader_that_leaves_early_is_no_error():
    code = "from offbeat_run import *\ndef main():\n    for _ in range(10**5): print('x' * 80)\nrun_command(main)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


def test_words_are_sorted_into_command_overrides_and_options():
    words = split_arguments(
        ["train", "my.toml", "--log.every", "5", "--log.keep=-1", "--out", "runs/a", "--fast", "-h"],
        options=("out",),
        switches=("fast",),
    )
    assert words.positionals == ("train", "my.toml")
    assert words.overrides == ("--log.every=5", "--log.keep=-1")
    assert words.options == {"out": "runs/a"}
    assert words.switches == {"fast", "help"}
    assert words.explain is None
    assert split_arguments(["--explain", "log.every"]).explain == "log.every"
    assert split_arguments(["--explain=log"]).explain == "log"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--otu", "x"], r"--otu: unknown option; did you mean --out\?"),
        (["--qqqqq"], "unknown option; a setting is --section.key VALUE"),
        (["--out"], "--out: needs a value"),
        (["--log.every", "--out", "x"], r"--log\.every: needs a value"),
        (["--fast=1"], "unknown option"),
        (["--out", ""], r"--out: needs a value, got an empty one: --out VALUE"),
        (["--out="], r"--out: needs a value, got an empty one"),
        (["--out", "s3://bucket/runs"], r"--out s3://bucket/runs: is an address; give a folder or a file"),
    ],
)
def test_a_wrong_option_is_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        split_arguments(words, options=("out",), switches=("fast",))


@pytest.mark.parametrize(("made", "stays"), [("", False), ("compiled", True)])
def test_a_run_that_compiles_nothing_leaves_no_folder_of_the_compiler(tmp_path, monkeypatch, made, stays):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # importing torch's compiler here sets it
    body = "import os, pathlib\n"
    body += f"folder = pathlib.Path({str(tmp_path / 'torchinductor_me')!r})\n"
    body += "folder.mkdir()\n"  # as importing torch's compiler does
    body += "os.environ['TORCHINDUCTOR_CACHE_DIR'] = str(folder)\n"
    body += f"if {made!r}: (folder / {made!r}).write_text('x')"
    done = run(body)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "torchinductor_me").exists() == stays


@dataclass(frozen=True, kw_only=True)
class Section:
    """A car."""

    speed: float = setting(1.0, "How fast.", "m/s", ge=0)


@dataclass(frozen=True, kw_only=True)
class Root:
    car: Section = field(default_factory=Section)


def call(*words):
    """Dispatch words to two commands; what was called."""
    called = []

    def record(name):
        return lambda sorted_words, *arguments: called.append((name, *arguments)) or 0

    commands = {
        "go": Command(record("go"), "FILE", options=("out", "seed"), overrides=True),
        "show": Command(record("show"), "RUN", options=("serve",)),
        "stop": Command(record("stop"), switches=("hard",)),
        "tow": Command(record("tow"), "CAR FILE"),
    }
    assert run_named_command(words, commands, Root) == 0
    return called


def test_a_command_gets_its_argument():
    assert call("go", "a.toml", "--out", "x", "--car.speed=2") == [("go", "a.toml")]
    assert call("show", "runs/a", "--serve", "8000") == [("show", "runs/a")]
    assert call("stop") == [("stop",)]
    assert call("stop", "--hard") == [("stop",)]
    assert call("tow", "red", "a.toml") == [("tow", "red", "a.toml")]


@pytest.mark.parametrize("words", [("walk",), ("go",), ("go", "a", "b"), ("stop", "now"), ("tow", "red")])
def test_a_command_that_cannot_be_is_named(words):
    with pytest.raises(ConfigError, match=r"no such command|takes"):
        call(*words)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "no command given; the commands are go, show, stop, tow; --help describes them"),
        (("walk",), "no such command: walk; the commands are go, show, stop, tow"),
        (("shwo", "a"), "no such command: shwo; did you mean show? the commands are go, show, stop, tow"),
        (("go",), "go takes one argument, FILE, got none"),
        (("stop", "now"), "stop takes no argument, got 1 (now)"),
        (("go", "a", "b"), "go takes one argument, FILE, got 2 (a b)"),
        (("go", ""), "go takes one argument, FILE, got an empty one"),
        (
            ("go", "a", "car.speed=2"),
            "go takes one argument, FILE, got 2 (a car.speed=2); a setting is written --car.speed=2",
        ),
        (
            ("go", "a", "+car.speed=2"),
            "go takes one argument, FILE, got 2 (a +car.speed=2); a setting is written --car.speed=2",
        ),
        (
            ("go", "a", "-car.speed", "2"),
            "go takes one argument, FILE, got 3 (a -car.speed 2); a setting is written --car.speed VALUE",
        ),
        (("go", "a", "--speed", "2"), "--speed: unknown option; did you mean --car.speed?"),
        (("go", "a", "--car_speed=2"), "--car_speed=2: unknown option; did you mean --car.speed?"),
    ],
)
def test_a_wrong_command_is_answered_with_the_right_ones(words, complaint):
    with pytest.raises(ConfigError) as refusal:
        call(*words)
    assert str(refusal.value) == complaint


USAGE = """\
A car.

  car go FILE      drive
      [--out X]    … into this folder
  car show RUN     look at it

  --out X          with go: a folder
  --fast           with
                   show: at once
  --loud           say more

exit codes: 0 and 1"""


@pytest.mark.parametrize("words", [(), ("--help",), ("help",), ("fly", "-h")])
def test_help_shows_the_whole_usage(words, capsys):
    assert show_usage(words, USAGE, "car")
    assert capsys.readouterr().out == USAGE + "\n"


@pytest.mark.parametrize("words", [("go", "--help"), ("help", "go"), ("go", "a.toml", "-h")])
def test_help_of_a_command_shows_its_lines_its_options_and_those_of_all(words, capsys):
    assert show_usage(words, USAGE, "car", settings=lambda: "none", read_by=("show",))
    shown = capsys.readouterr().out
    assert shown == (
        "  car go FILE      drive\n      [--out X]    … into this folder\n\n"
        "  --out X          with go: a folder\n  --loud           say more\n\nexit codes: 0 and 1\n"
    )


def test_help_of_a_command_that_reads_settings_lists_the_everyday_ones(capsys):
    assert show_usage(["show", "--help"], USAGE, "car", settings=lambda: "  --car.speed", read_by=("show",))
    shown = capsys.readouterr().out
    assert "show: at once" in shown
    assert "--out" not in shown
    assert shown.endswith("(--explain all has every setting):\n  --car.speed\n\nexit codes: 0 and 1\n")


def test_the_version_is_that_of_the_distribution(capsys):
    assert show_usage(["--version"], USAGE, "offbeat-run")
    assert capsys.readouterr().out == f"offbeat-run {version('offbeat-run')}\n"
    assert not show_usage(["go", "a.toml"], USAGE, "car")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("show", "runs/a", "--seed", "3"), "show takes no --seed; it takes --serve"),
        (("show", "runs/a", "--car.speed=2"), "show takes no settings: got --car.speed=2; it takes --serve"),
        (("stop", "--serve", "9"), "stop takes no --serve; it takes --hard"),
        (("tow", "red", "a.toml", "--hard"), "tow takes no --hard; it takes no option"),
        (("tow", "red"), "tow takes 2 arguments, CAR FILE, got 1 (red)"),
        (("go", "a.toml", "--serve=9"), "go takes no --serve; it takes --out, --seed, --section.key"),
    ],
)
def test_an_option_that_a_command_would_ignore_is_refused(words, complaint):
    with pytest.raises(ConfigError) as refusal:
        call(*words)
    assert str(refusal.value) == complaint


def test_explain_answers_instead_of_a_command(capsys):
    assert call("--explain", "car.speed") == []
    assert "How fast." in capsys.readouterr().out


@pytest.mark.parametrize("words", [("--explain",), ("--explain", "--hard"), ("--explain=",)])
def test_explain_alone_lists_the_sections(words, capsys):
    assert call(*words) == []
    assert capsys.readouterr().out.splitlines() == [
        "Sections; --explain SECTION lists the keys of one, --explain all those of every section:",
        "  car  A car.",
    ]


def test_a_new_run_has_a_folder_named_after_its_file():
    assert new_run_folder(CommandWords(), "sums").parent == Path("runs")
    assert new_run_folder(CommandWords(), "sums").name.startswith("sums-")
    assert new_run_folder(CommandWords(options={"out": "here"}), "sums") == Path("here")


def test_whole_numbers_are_checked():
    assert whole_number(CommandWords(options={"seed": "7"}), "seed") == 7
    with pytest.raises(ConfigError, match="--seed"):
        whole_number(CommandWords(options={"seed": "-1"}), "seed")
    for digits in (20, 5000):
        with pytest.raises(ConfigError, match="--seed needs a whole number of at most 9007199254740992: got 999"):
            whole_number(CommandWords(options={"seed": digits * "9"}), "seed")


COUNTS = [(7, "7"), (789_888, "790 k"), (134_515_008, "135 M"), (8 * 10**9, "8 B"), (999_600, "1000 k")]
SIZES = [(10, "10 bytes"), (2048, "2 KiB"), (3 * 2**30, "3 GiB"), (2**40, "1 TiB"), (1020 << 10, "1020 KiB")]


@pytest.mark.parametrize(("number", "text"), COUNTS)
def test_counts_are_written_for_people(number, text):
    assert count_text(number) == text


@pytest.mark.parametrize(("size", "text"), SIZES)
def test_sizes_are_written_for_people(size, text):
    assert size_text(size) == text


def test_mistakes_of_several_checks_are_reported_together():
    problems = Problems()
    problems.raise_all()
    for text in ("a model", "some data", "a model"):
        with problems.collected():
            raise DataError(text)
    with pytest.raises(ConfigError) as refusal:
        problems.raise_all()
    assert str(refusal.value) == "2 problems\n  a model\n  some data"


def test_one_mistake_keeps_its_kind_and_other_errors_are_not_kept():
    problems = Problems()
    with problems.collected():
        raise DataError("some data")
    with pytest.raises(DataError, match=r"^some data$"):
        problems.raise_all()
    with pytest.raises(DeadlineError), problems.collected():
        raise DeadlineError("what is wrong", "x", 1.0)


def test_no_line_of_a_table_is_padded(capsys):
    print_table([("a", "short"), ("b", "long " * 30)], title="plan")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["plan", "a  short"]
    assert [line for line in lines if line != line.rstrip()] == []


def test_brackets_in_a_table_are_text(capsys):
    print_table([("install", 'pip install "x[engine]"')])
    assert "[engine]" in capsys.readouterr().out
