"""Commands of an application by name, and what all applications do alike: new folders, tables, the report."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat_run._command import CommandWords, split_arguments
from offbeat_run._config_text import explain
from offbeat_run._doctor import examine
from offbeat_run._folder import RunFolder
from offbeat_run._report import write_report
from offbeat_run._secrets import hide_secrets
from offbeat_run._serve import serve_report
from offbeat_types import ConfigError


@dataclass(frozen=True)
class Command:
    """One command of an application.

    Args:
        run: called with the sorted words, and with the argument if it takes one; returns the exit code.
        argument: what it takes, such as "FILE", or "TOOL FILE" for two; empty for nothing.
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
    sorted_words = split_arguments(words, options=options, switches=switches)
    if sorted_words.explain:
        print(explain(config_type, sorted_words.explain))
        return 0
    name, *arguments = sorted_words.positionals or ("",)
    if name not in commands:
        raise ConfigError(f"no such command: {name or 'none given'}; known: {', '.join(commands)}; --help says more")
    command = commands[name]
    if len(arguments) != (num_wanted := len(command.argument.split())):
        wanted = "one " * (num_wanted == 1) + (command.argument or "no argument")
        raise ConfigError(f"{name} takes {wanted}: got {' '.join(arguments) or 'none'}")
    _refuse_unread(name, command, sorted_words)
    return command.run(sorted_words, *arguments)


def _refuse_unread(name: str, command: Command, words: CommandWords) -> None:
    takes, given = (*command.options, *command.switches), (*words.options, *sorted(words.switches))
    known = [f"--{option}" for option in takes] + ["--section.key"] * command.overrides
    advice = f"it takes {', '.join(known) or 'no option'}"
    if unread := [f"--{option}" for option in given if option not in takes]:
        raise ConfigError(f"{name} takes no {', '.join(unread)}; {advice}")
    if words.overrides and not command.overrides:
        raise ConfigError(f"{name} takes no settings: got {words.overrides[0]}; {advice}")


def new_run_folder(words: CommandWords, name: str) -> Path:
    """The folder of a new run: `--out`, or runs/NAME-DATE-TIME."""
    return Path(words.options.get("out") or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def whole_number(words: CommandWords, option: str, default: int = 0) -> int:
    """The value of an option that is a whole number.

    Raises:
        ConfigError: it is something else.
    """
    text = words.options.get(option, str(default))
    if not text.isdecimal():
        raise ConfigError(f"--{option} needs a whole number: got {text!r}")
    return int(text)


def report_command(words: CommandWords, folder: str) -> int:
    """`report RUN`: write report.html again; with `--serve PORT` serve it until interrupted."""
    with RunFolder.open(folder, write=False) as run:
        if "serve" in words.options:
            serve_report(run, whole_number(words, "serve"))
        else:
            print(f"report: {write_report(run)}")
    return 0


def doctor_command(_: CommandWords) -> int:
    """`doctor`: versions, devices, and why a backend is not there."""
    print_table(examine())
    return 0


def print_table(rows: Sequence[tuple[str, str]], *, title: str = "") -> None:
    """Print rows of (name, text); a long text is folded, never cut, and a secret of the environment named."""
    from rich.console import Console  # imported late: most commands print no table
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(Text(hide_secrets(cell)) for cell in row))  # plain: "[engine]" is no markup
    Console().print(table)
