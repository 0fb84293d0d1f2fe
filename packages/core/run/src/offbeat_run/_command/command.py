"""The boundary of a command line: words in, the command that they name, an exit code and one clear line out."""

import contextlib
import difflib
import io
import os
import re
import shlex
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from offbeat_core import (
    ConfigError,
    OffbeatError,
    UserError,
    defer_device_backends,
    explain,
    load_config,
    naming_lines,
    sections_of,
)
from offbeat_http import raise_descriptor_limit
from offbeat_run._command.error_file import leave_error
from offbeat_run._command.examine import examine, examine_needs
from offbeat_run._command.signals import interrupted_by_signals
from offbeat_run._console.printing import print_text, shown
from offbeat_run._console.status import doing, showing_status
from offbeat_run._folder.folder import RunFolder, last_has_checkpoint
from offbeat_run._folder.lock import last_locked
from offbeat_run._report.page import write_report
from offbeat_run._report.serving import serve_report

INTERRUPTED = 130
CLOSED_PIPE = 141
TRACEBACK_VARIABLE = "OFFBEAT_TRACEBACK"
_COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_LARGEST_NUMBER = 2**53


@dataclass(frozen=True, kw_only=True)
class CommandWords:
    """The words of a command line, sorted.

    Args:
        positionals: words without dashes: the command, then its FILE or RUN.
        overrides: `--section.key value` pairs, for `load_config`.
        explain: the key after `--explain`, empty where no key follows; None without it.
        options: values of the application's own options, by name without dashes.
        switches: the application's own switches that were given, and "help" for -h or --help.
        text: all of them, as they can be typed again.
    """

    positionals: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    explain: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    switches: frozenset[str] = frozenset()
    text: str = ""


def split_arguments(
    words: Sequence[str],
    *,
    options: Collection[str] = (),
    switches: Collection[str] = (),
    settings: Collection[str] = (),
) -> CommandWords:
    """Sort the words of a command line, such as `train my.toml --checkpoint.every 5 --out runs/a`.

    Args:
        words: without the program's name.
        options: names that take a value, such as "out"; `--out X` and `--out=X`.
        switches: names that take none, such as "plan".
        settings: keys of the configuration, such as "engine.seed", one of which may be meant by an unknown option.

    Raises:
        ConfigError: an option that is not known, or one without its value, or with an address for one.
    """
    positionals: list[str] = []
    overrides: list[str] = []
    held: dict[str, str] = {}
    given: set[str] = set()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word in ("-h", "--help"):
            given.add("help")
        elif not word.startswith("--"):
            positionals.append(word)
        elif name in switches and not equals:
            given.add(name)
        elif name == "explain" and not equals and (not rest or rest[0].startswith("--")):
            held[name] = ""
        elif "." in name or name in ("explain", *options):
            text = value if equals else _next_value(name, rest)
            if "." in name:
                overrides += [f"--{name}={text}"]
            else:
                held[name] = _option_value(name, text)
        else:
            raise ConfigError(_unknown_option(word, [*options, *switches, "explain", "help"], settings))
    return CommandWords(
        positionals=tuple(positionals),
        overrides=tuple(overrides),
        explain=held.pop("explain", None),
        options=held,
        switches=frozenset(given),
        text=shlex.join(words),
    )


def _next_value(name: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"--{name}: needs a value: --{name} VALUE")
    return rest.pop(0)


def _option_value(name: str, text: str) -> str:
    """Refuse what no option of a command takes: nothing, as of a variable that is not set, and an address."""
    if not text and name != "explain":
        raise ConfigError(f"--{name}: needs a value, got an empty one: --{name} VALUE")
    if _ADDRESS.match(text):
        raise ConfigError(f"--{name} {text}: is an address; give a folder or a file of this machine, and copy it there")
    return text


def _unknown_option(word: str, known: Collection[str], settings: Collection[str]) -> str:
    name = word.lstrip("-").partition("=")[0]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean --{near[0]}?" if near else "a setting is --section.key VALUE; --help lists the options"
    if meant := _settings_like(name, settings):
        hint = f"did you mean {' or '.join(f'--{key}' for key in meant)}?"
    return f"{word}: unknown option; {hint}"


def _settings_like(name: str, settings: Collection[str]) -> list[str]:
    """Return the keys that are meant by a key without its section, or with another sign between them."""
    flat = name.lower().replace("-", "_").replace(".", "_")
    return [key for key in settings if flat in (key.partition(".")[2], key.replace(".", "_"))]


def _setting_words(words: Sequence[str], settings: Collection[str]) -> str:
    """Say how the settings among stray words are written, as `engine.seed=1` or `-engine.seed 1`; empty for none."""
    for word in words:
        name, equals, value = word.lstrip("+-").partition("=")
        if meant := _settings_like(name, settings) if equals or word.startswith("-") or "." in name else []:
            return f"; a setting is written --{meant[0]}{'=' + value if equals else ' VALUE'}"
    return ""


def run_command(main: Callable[[], int | None], *, program: str | None = None) -> NoReturn:
    """Run a command and leave the process with its exit code.

    0 or what `main` returns; an `OffbeatError`'s own code (2, 3 or 4) after one message on stderr; 130 when
    interrupted by Ctrl-C, SIGTERM, SIGHUP or SIGUSR1; 1 with a traceback for anything else, which is our bug. A run
    that failed (3, 4) or was interrupted says how it is resumed.

    Args:
        main: the command.
        program: its name, for the line that resumes; taken from the command line when None.
    """
    raise_descriptor_limit()
    _print_whatever_the_encoding()
    defer_device_backends()  # main imports torch
    is_users_own = _COMPILER_CACHE in os.environ
    with interrupted_by_signals(), showing_status():
        code = _exit_code(main, program or os.path.basename(sys.argv[0]))
    if not is_users_own:
        _remove_unused_cache()
    sys.exit(code)


def _print_whatever_the_encoding() -> None:
    """Write what the terminal's encoding lacks, such as a bar or an arrow in Latin-1, as an escape, not as an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _remove_unused_cache() -> None:
    """Remove the folder of torch's compiler where nothing was compiled.

    Expected: it is made when something is compiled. Happens: importing torch._dynamo makes it in the temporary folder,
    and puts its name into the environment (torch 2.13, torch/_dynamo/package.py, CACHE_DIR).
    """
    with contextlib.suppress(KeyError, OSError):  # torch was not imported, or something is in it
        os.rmdir(os.environ[_COMPILER_CACHE])


def _exit_code(main: Callable[[], int | None], program: str) -> int:
    try:
        code = main() or 0
        sys.stdout.flush()
    except OffbeatError as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            print_text(traceback.format_exc(), to_stderr=True)
        print_text(_broken_at_words(f"error: {error}"), to_stderr=True)
        if not isinstance(error, UserError) and last_has_checkpoint() and (advice := _advice(program)):
            # Without a checkpoint it would begin anew, and end in the same way.
            print_text(_broken_at_words(advice), to_stderr=True)
        leave_error(error, error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        print_text("\n" + "; ".join(filter(None, ("interrupted", _advice(program)))), to_stderr=True)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left, as in `plan my.toml | head`. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except MemoryError as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            print_text(traceback.format_exc(), to_stderr=True)
        text = f": {error}" if str(error) else ""
        print_text(f"error: no memory left{text}; {TRACEBACK_VARIABLE}=1 shows where it was asked for", to_stderr=True)
        leave_error(error, UserError.exit_code)
        return UserError.exit_code
    except Exception as error:  # noqa: BLE001 - this is the boundary
        print_text(traceback.format_exc(), to_stderr=True)
        print_text(f"error: unexpected, as above; this is a bug in {program} or in code it was given", to_stderr=True)
        leave_error(error, 1)
        return 1
    return code


def _broken_at_words(text: str) -> str:
    """Return the text as a terminal shows it best, which would break a line anywhere; a log gets it as it is."""
    width = os.get_terminal_size(sys.stderr.fileno()).columns if sys.stderr.isatty() else 0
    if not width:  # a log, or a terminal that does not say how wide it is
        return text
    fill = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False, subsequent_indent="  ")
    return "\n".join(map(fill, text.splitlines()))


def _advice(program: str) -> str:
    """Return how to continue with the run folder this process wrote to, if it did."""
    folder = last_locked()
    return f"resume with: {program} resume {folder}" if folder else ""


def show_usage(
    words: Sequence[str], usage: str, program: str, *, settings: Callable[[], str] = str, read_by: Collection[str] = ()
) -> bool:
    """Print the usage, the part of it that is about one command, or the version, where the words ask for it.

    Args:
        words: without the program's name.
        usage: a heading, the commands, the options of several of them, a line each, and what holds for all, each after
            an empty line. The lines of a command begin with the program's name and its own. An option that is not for
            all commands names those that it is for.
        program: its name, which is also that of its distribution.
        settings: returns the list of the everyday settings, see `list_settings`.
        read_by: commands whose help shows that list.

    Returns:
        True if something was asked for and printed.
    """
    if words[:1] in (["--version"], ["-V"]):
        print(f"{program} {version(program)}")
        return True
    if words and words[0] != "help" and not {"-h", "--help"} & set(words):
        return False
    named = [word for word in words if word not in ("help", "-h", "--help")]
    parts = _usage_of(named[0], usage, program) if named else []
    if parts and named[0] in read_by:
        parts.insert(2, f"everyday settings, here or in a file (--explain all has every setting):\n{settings()}")
    print("\n\n".join(parts) or usage)
    return True


def _usage_of(name: str, usage: str, program: str) -> list[str]:
    """Return the lines of one command, its options, and what holds for all; nothing where there is no such command."""
    _, commands, options, *rest = usage.split("\n\n")
    of_each = {lines.split()[1]: lines for lines in re.split(rf"\n(?=  {program} )", commands)}
    if name not in of_each:
        return []
    others = of_each.keys() - {name}
    kept = []
    for option in re.split(r"\n(?=  \S)", options):
        said = set(re.findall(r"\w+", option))
        if name in said or not others & said:
            kept.append(option)
    return [of_each[name], "\n".join(kept), *rest]


@dataclass(frozen=True)
class Command:
    """One command of an application.

    Args:
        run: called with the sorted words, and with the argument if it takes one; returns the exit code.
        argument: what it takes, such as "FILE", or "TOOL FILE" for two, or "[FILE]" for one that may be left
            out; empty for nothing.
        options: names of the options it reads, each with a value, such as "out".
        overrides: whether it reads settings, as `--section.key VALUE`.
        switches: names of the options it reads that have no value, such as "shrink".
    """

    run: Callable[..., int]
    argument: str = ""
    options: tuple[str, ...] = ()
    overrides: bool = False
    switches: tuple[str, ...] = ()


def run_named_command(words: Sequence[str], commands: Mapping[str, Command], config_type: type) -> int:
    """Run the command that the words name, or answer `--explain`.

    Args:
        words: without the program's name.
        commands: by name.
        config_type: root of the configuration, for `--explain`.

    Raises:
        ConfigError: no such command, the wrong number of arguments, or an option that the command does not read.
        OffbeatError: whatever the command raises.
    """
    options = {option for command in commands.values() for option in command.options}
    switches = {switch for command in commands.values() for switch in command.switches}
    settings = [f"{section.name}.{key}" for section in sections_of(config_type).values() for key in section.keys]
    sorted_words = split_arguments(words, options=options, switches=switches, settings=settings)
    if sorted_words.explain is not None:
        print(explain(config_type, sorted_words.explain))
        return 0
    name, *arguments = sorted_words.positionals or ("",)
    if name not in commands:
        raise ConfigError(_unknown_command(name, commands))
    command = commands[name]
    if len(arguments) != len(command.argument.split()) and not (command.argument.startswith("[") and not arguments):
        got = f"{len(arguments)} ({' '.join(arguments)})" if arguments else "none"
        raise ConfigError(f"{_wanted_words(name, command.argument)}, got {got}{_setting_words(arguments, settings)}")
    if "" in arguments:
        raise ConfigError(f"{_wanted_words(name, command.argument)}, got an empty one")
    _refuse_unread(name, command, sorted_words)
    if command.overrides:
        doing(" ".join(("reading the configuration", *arguments)))
    return command.run(sorted_words, *arguments)


def _unknown_command(name: str, commands: Mapping[str, Command]) -> str:
    known = f"the commands are {', '.join(commands)}"
    if not name:
        return f"no command given; {known}; --help describes them"
    near = difflib.get_close_matches(name, commands, n=1)
    return f"no such command: {name}; {f'did you mean {near[0]}? ' if near else ''}{known}"


def _wanted_words(name: str, argument: str) -> str:
    """Say what a command takes: "compare takes 2 arguments, EVAL EVAL"."""
    number = len(argument.split())
    return f"{name} takes " + {0: "no argument", 1: f"one argument, {argument}"}.get(
        number, f"{number} arguments, {argument}"
    )


def _refuse_unread(name: str, command: Command, words: CommandWords) -> None:
    takes, given = (*command.options, *command.switches), (*words.options, *sorted(words.switches))
    known = [f"--{option}" for option in takes] + ["--section.key"] * command.overrides
    advice = f"it takes {', '.join(known) or 'no option'}"
    if unread := [f"--{option}" for option in given if option not in takes]:
        raise ConfigError(f"{name} takes no {', '.join(unread)}; {advice}")
    if words.overrides and not command.overrides:
        raise ConfigError(f"{name} takes no settings: got {words.overrides[0]}; {advice}")


def new_run_folder(words: CommandWords, name: str) -> Path:
    """Return the folder of a new run: `--out`, or runs/NAME-DATE-TIME."""
    return Path(words.options.get("out") or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def whole_number(words: CommandWords, option: str, default: int = 0) -> int:
    """Return the value of an option that is a whole number.

    Raises:
        ConfigError: it is something else.
    """
    text = words.options.get(option, str(default))
    if not text.isdecimal():
        raise ConfigError(f"--{option} needs a whole number: got {text!r}")
    if len(text) > len(str(_LARGEST_NUMBER)) or int(text) > _LARGEST_NUMBER:
        raise ConfigError(f"--{option} needs a whole number of at most {_LARGEST_NUMBER}: got {text:.40}")
    return int(text)


def report_command(words: CommandWords, folder: str) -> int:
    """`report RUN`: write report.html again; with `--serve PORT` serve it until interrupted."""
    with RunFolder.open(folder, write=False) as run:
        doing("" if "serve" in words.options else "writing the report")
        if "serve" in words.options:
            serve_report(run, whole_number(words, "serve"))
        else:
            print_text(f"report: {write_report(run)}")
    return 0


def doctor_command(
    words: CommandWords,
    file: str = "",
    *,
    config_type: type,
    checks: Callable[[Any], Mapping[str, Callable[[], object]]],
) -> int:
    """`doctor`: what is missing for what, devices and versions; `doctor FILE`: what a configuration needs.

    Args:
        words: of the command line.
        file: a configuration; empty for none.
        config_type: root of the configuration.
        checks: returns what a configuration needs, see `examine_needs`.

    Returns:
        2 if something is missing that the configuration needs, else 0.
    """
    doing("looking for packages, devices and backends", file)
    if not file:
        if words.overrides:
            raise ConfigError(f"doctor takes settings with a FILE only: got {words.overrides[0]}")
        print_table(examine(sections_of(config_type).keys(), shows_all="all" in words.switches))
        return 0

    def check_there(check: Callable[[], object]) -> None:
        with naming_lines(file, config_type, words.overrides):
            check()

    found = checks(load_config(file, config_type, words.overrides))
    rows, is_ready = examine_needs({what: partial(check_there, check) for what, check in found.items()})
    print_table(rows)
    return 0 if is_ready else UserError.exit_code


def print_table(rows: Sequence[tuple[str, str]], *, title: str = "") -> None:
    """Print rows of (name, text); a long text is folded, never cut, and a secret of the environment named."""
    from rich.console import Console  # imported late: most commands print no table
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(Text(shown(cell)) for cell in row))  # plain: "[engine]" is no markup
    console = Console()
    with console.capture() as printed:
        console.print(table)
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))  # rich pads lines to the terminal's width
