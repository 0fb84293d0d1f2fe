"""Texts of a configuration: variables in them, and paths, which are relative to their file or to the working folder.

A relative path becomes FOLDER/./PATH: it leads to the same place from everywhere, so that a run can be resumed from any
folder, and what the user wrote stays readable in it. rsync marks the relative part of a path in the same way.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from offbeat_core._config.schema import Key, keys_of, named_class, nested_class, sections_of
from offbeat_core._config.secrets import mark_secrets
from offbeat_core._config.setting import PathKind, Setting
from offbeat_core._hub_names import RELATIVE_FROM, is_hub_name

# One pass over the text, so that what a variable holds is never expanded again. One more dollar before `${`, or
# before a leading `~`, stands for the text itself.
_REFERENCE = re.compile(
    r"\$(?P<escaped>\$+\{)"
    r"|\A\$(?P<escaped_home>\$*~)(?=/|\Z)"
    r"|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}"
    r"|(?P<home>\A~)(?=/|\Z)"
    r"|(?P<broken>\$\{)"
)


class ValueProblemError(Exception):
    """A value that does not fit: `got` describes it; where `got` is empty, the text is the whole message."""

    def __init__(self, text: str = "", *, got: str = "") -> None:
        super().__init__(text or f"got {got}")
        self.got = got


def expand_text(text: str) -> str:
    """Expand `${NAME}`, `${NAME:-default}` and a leading `~`; `$${` and `$~` stand for `${` and `~` themselves."""

    def replace(match: re.Match[str]) -> str:
        for escaped in (match["escaped"], match["escaped_home"]):
            if escaped is not None:
                return str(escaped)
        if match["home"] is not None:
            return os.path.expanduser("~")
        if match["broken"] is not None:
            raise ValueProblemError("${ must name a variable, as ${NAME} or ${NAME:-default}; write $${ for the text")
        return _variable(match["name"], match["default"], at_start=match.start() == 0)

    return _REFERENCE.sub(replace, text)


def _variable(name: str, default: str | None, *, at_start: bool) -> str:
    value = os.environ.get(name) or default  # as in a shell, `:-` also covers a variable that is set but empty
    if value is None:
        value = os.environ.get(name)
    if value is None:
        raise ValueProblemError(f"environment variable {name} is not set; set it, or write ${{{name}:-default}}")
    starts_at_home = at_start and (value == "~" or value.startswith("~/"))
    return os.path.expanduser(value) if starts_at_home else value


def escape_text(text: str) -> str:
    """Return the inverse of `expand_text`: a text that expands to `text`."""
    return re.sub(r"\A(?=\$*~(?:/|\Z))|(?=\$+\{)(?<!\$)", "$", text)


def expand(value: Any) -> Any:
    """Expand every string in a value read from TOML; keys of tables stay as they are."""
    if isinstance(value, str):
        return expand_text(value)
    if isinstance(value, list | tuple):
        return type(value)(expand(item) for item in value)
    if isinstance(value, dict):
        return {key: expand(item) for key, item in value.items()}
    return value


def escape(value: Any) -> Any:
    """Return the inverse of `expand`.

    What a secret variable of the environment holds becomes a reference to it again.
    """
    if isinstance(value, str | Path):
        text, marks = mark_secrets(str(value))
        text = escape_text(text)
        for mark, reference in marks.items():
            text = text.replace(mark, reference)
        return text
    if isinstance(value, list | tuple):
        return [escape(item) for item in value]
    if isinstance(value, dict):
        return {key: escape(item) for key, item in value.items()}
    return value


_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*:")
"""Begins an address, a generator such as arithmetic:2, or a name of the Hub as hub:OWNER/NAME."""
_ANCHORED: Final = ("/", "~")
"""Begin paths that are not relative."""

_OF_THE_HUB: Final = ("model", "dataset")

Report = Callable[[tuple[str, ...], str], None]
"""Takes a problem: the keys that lead to it, and the text."""


def folder_of(file: Path) -> Path:
    """Return the folder of a file, absolute and without `..`; a link to the file is not followed."""
    folder = file.absolute().parent
    return folder.resolve() if ".." in folder.parts else folder


def place_table(table: Mapping[str, Any], keys: Mapping[str, Key], folder: Path, report: Report) -> dict[str, Any]:
    """Return a table of a file with its relative paths made absolute; those that are refused stay as they are.

    Args:
        table: of a section, as TOML has it.
        keys: of the section.
        folder: of the file.
        report: takes paths that lie in the working folder and not in that of the file.
    """
    placed = {}
    for name, value in table.items():
        try:
            placed[name] = _place_key(keys[name], value, folder, report) if name in keys else value
        except ValueProblemError as problem:
            placed[name] = value
            report((name,), str(problem))
    return placed


def place_paths(sections: Mapping[str, Mapping[str, Any]], root_type: type) -> dict[str, Any]:
    """Return sections that a program has made, with their paths, relative to the working folder, made absolute.

    Args:
        sections: by name.
        root_type: of the configuration.
    """
    known = sections_of(root_type)

    def place_section(name: str, table: Mapping[str, Any]) -> Mapping[str, Any]:
        return (
            place_table(table, known[name].keys, Path.cwd(), lambda *_: None)
            if name in known and isinstance(table, Mapping)
            else table
        )

    return {name: place_section(name, table) for name, table in sections.items()}


def _place_key(key: Key, value: Any, folder: Path, report: Report) -> Any:
    def below(*names: str) -> Report:
        return lambda path, text: report((key.name, *names, *path), text)

    if not isinstance(value, dict):
        return place(value, key.setting, folder)
    if named := named_class(key.annotation):
        inner = keys_of(named)
        return {
            name: place_table(table, inner, folder, below(name)) if isinstance(table, dict) else table
            for name, table in value.items()
        }
    if nested := nested_class(key.annotation):
        return place_table(value, keys_of(nested), folder, below())
    return place(value, key.setting, folder)


def place(value: Any, setting: Setting, folder: Path | None = None) -> Any:
    """Return a value of a path setting with relative paths made absolute, and any other value as it is.

    Args:
        value: as TOML has it: a text, or a list or a table of texts.
        setting: says by `path` or `hub` which paths it takes.
        folder: that relative paths are relative to; None: the working folder.

    Raises:
        ValueProblemError: a path is not in the folder and lies in the working folder.
    """
    return _place(value, setting.hub or setting.path, str(folder or Path.cwd()))


def _place(value: Any, kind: str | Mapping[str, PathKind], folder: str) -> Any:
    if not kind:
        return value
    if isinstance(value, str):
        return _place_text(value, kind, folder) if isinstance(kind, str) else value
    if isinstance(value, list):
        return [_place(item, kind, folder) for item in value]
    if not isinstance(value, dict):
        return value
    if isinstance(kind, str):  # names of functions, each with a weight or with options
        return {_place(name, kind, folder): item for name, item in value.items()}
    return {name: _place(item, kind.get(name, ""), folder) for name, item in value.items()}


def _place_text(text: str, kind: str, folder: str) -> str:
    try:
        path = expand_text(text)
    except ValueProblemError:
        return text  # refused later, with what is wrong with its variables
    if not path or path.startswith(_ANCHORED):
        return text
    file = path.rpartition(":")[0] if kind == "function" else path
    if kind != "output" and _may_be_path(file, kind) and _is_only_in_working_folder(file, folder):
        raise ValueProblemError(
            f"{file} is not in {folder}, the folder of the file, from which its relative paths are read; it lies in "
            f"the working folder: write {os.path.relpath(file, folder)}"
        )
    if _is_path(file, kind, folder):
        return f"{escape_text(folder)}{RELATIVE_FROM}{text}"
    is_hidden = kind in _OF_THE_HUB and is_hub_name(path, folder) and not is_hub_name(path)
    return f"hub:{text}" if is_hidden else text  # else a folder of the working folder would decide what it means


def _may_be_path(text: str, kind: str) -> bool:
    """Return whether a relative text may be a path, by its form."""
    if kind == "function":
        return text.endswith(".py")
    if kind == "command":
        return text.endswith(".py") or text.startswith(("./", "../"))
    return True


def _is_path(text: str, kind: str, folder: str) -> bool:
    """Return whether a relative text is a path, and not the name of something else."""
    if kind not in _OF_THE_HUB or os.path.exists(os.path.join(folder, text)):
        return _may_be_path(text, kind)
    return not is_hub_name(text, folder) and not _SCHEME.match(text)


def _is_only_in_working_folder(path: str, folder: str) -> bool:
    return os.path.exists(path) and not os.path.exists(os.path.join(folder, path))


def path_from(text: str, setting: Setting, folder: Path) -> str:
    """Return how a file has to write what a command line has named, which is relative to the working folder.

    Args:
        text: of the command line.
        setting: that takes it.
        folder: of the file.
    """
    kind = setting.hub or setting.path
    file, colon, function = text.rpartition(":") if kind == "function" else (text, "", "")
    is_path = isinstance(kind, str) and _may_be_path(file, kind) and not text.startswith(_ANCHORED)
    return os.path.relpath(file, folder) + colon + function if is_path and os.path.exists(file) else text
