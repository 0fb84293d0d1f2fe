"""`import FRAMEWORK FILE` of an application: writes our TOML, and lists what did not come along."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offbeat_core import ConfigError, write_new_file
from offbeat_recipes._imports.draft import CHANGES_RESULT, RecipeBuilder
from offbeat_recipes._imports.options import Source
from offbeat_run import CommandWords, print_text

_NOT_THE_SAME: Final = 4
"""Exit code of `--strict`: the file is written, and would not train as the source does."""


@dataclass(frozen=True)
class Framework:
    """A framework whose options are imported.

    Args:
        read: a file, and the variables that its script may use.
        check: refuses what is another kind of run, by the file's name, and reports what is not known of one.
        translate: what the file holds.
    """

    read: Callable[[Path, Mapping[str, str]], Source]
    check: Callable[[Source, Path], Sequence[str]]
    translate: Callable[[Source], RecipeBuilder]


def import_recipe(
    words: CommandWords,
    framework: str,
    file: str,
    *,
    program: str,
    frameworks: Mapping[str, Framework],
    check: Callable[[str, Path], Sequence[str]],
) -> int:
    """`import FRAMEWORK FILE [--out NEW_FILE] [--set NAME=VALUE,…] [--strict]`.

    Args:
        words: of the command line.
        framework: name of it.
        file: of its options.
        program: the application's name.
        frameworks: that it knows.
        check: what the application says of a configuration's text, which would lie in a file: choices that are probably
            not meant.

    Returns:
        0; with `--strict` 4 if an option that changes the result is lost, or if something has to be corrected.

    Raises:
        ConfigError: no such framework, a file without options, or one of another kind of run.
        RunFolderError: the new file is there already, or cannot be written.
    """
    if framework not in frameworks:
        raise ConfigError(f"import knows {', '.join(frameworks)}: got {framework!r}")
    path, found = Path(file), frameworks[framework]
    target = Path(words.options.get("out") or f"{path.stem}.toml")
    source = found.read(path, _variables(words.options.get("set", "")))
    messages = found.check(source, path)
    draft = found.translate(source)
    if not draft.knows_any:
        names = ", ".join(list(source.options)[:3])
        raise ConfigError(
            f"{path} holds no option of {framework} that is known here, but {names}: give a file of {framework}"
        )
    remarks = {
        "not decided": source.undecided,
        "not understood": (*messages, *source.not_understood),
        "exported by the script": source.exports,
    }
    head = f"Written by `{program} import {framework}` from {path.name}.\nBehind each key: its source."
    text = draft.as_toml(head, remarks)
    write_new_file(target, text, "--out")
    _notify(draft, remarks)
    notices, problems = _judge(lambda: check(text, target))
    _print_lines("copied as it is, and worth a look", notices)
    print_text(f"written to {target}" + (", but it has to be corrected before it runs:" if problems else ""))
    for problem in problems:
        print_text(f"  {problem}")
    return _NOT_THE_SAME if "strict" in words.switches and (draft.lost or problems) else 0


def _variables(text: str) -> dict[str, str]:
    """Return the variables that `--set` gives a script.

    Raises:
        ConfigError: a part of it is not NAME=VALUE.
    """
    parts = [part.partition("=") for part in text.split(",") if part]
    if any(not name or not equals for name, equals, _ in parts):
        raise ConfigError(f"--set takes variables of the script, as in DEVICE=gpu,NNODES=2: got {text!r}")
    return {name: value for name, _, value in parts}


def _notify(draft: RecipeBuilder, remarks: Mapping[str, Sequence[str]]) -> None:
    messages = {
        title: [f"{draft.value(name)}: {text}" for name, text in found.items()]
        for title, found in draft.messages().items()
    }
    lost = messages.pop(CHANGES_RESULT, [])
    if lost:
        _print_lines(CHANGES_RESULT, lost)
        print_text("")
    for title, lines in remarks.items():
        _print_lines(f"{title}{' (a variable can be given: --set NAME=VALUE)' * (title == 'not decided')}", lines)
    for title, lines in messages.items():
        _print_lines(title, lines)
    print_text(f"{len(draft.entries)} keys written")


def _print_lines(title: str, lines: Sequence[str]) -> None:
    if lines:
        print_text(f"{title}:")
        print_text("\n".join(f"  {line}" for line in lines))


def _judge(check: Callable[[], Sequence[str]]) -> tuple[Sequence[str], Sequence[str]]:
    """Return what the configuration says of what was written: choices that are unusual, and errors."""
    try:
        return check(), ()
    except ConfigError as error:
        return (), [line.strip() for line in str(error).splitlines()]
