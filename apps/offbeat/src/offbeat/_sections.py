"""Arguments of a training as a configuration: sections as TOML, and rows of data as files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from offbeat._calls import plain
from offbeat_core import ConfigError, DataError, RunFolderError, toml_value

PATHS: Final = {"path": "train", "eval_path": "held-out"}
"""Keys of the data section that may hold rows, each with the name of the file for them."""

Sections = dict[str, dict[str, Any]]


def data_section(data: Any, eval_data: Any) -> dict[str, Any]:
    """Return the `data` section; rows in it are as they were given.

    Raises:
        ConfigError: neither a path nor rows.
    """
    section = dict(data) if isinstance(data, Mapping) else {"path": data}
    if eval_data is not None:
        section["eval_path"] = eval_data
    for key in PATHS:
        if key in section and not isinstance(section[key], str | Path) and not _has_rows(section[key]):
            raise ConfigError(
                f"data.{key}: must be a path, a name of the Hub, a list of dicts or a Dataset, got "
                f"{type(section[key]).__name__}"
            )
    return section


def _has_rows(data: Any) -> bool:
    return isinstance(data, list | tuple) or hasattr(data, "to_parquet") or hasattr(data, "column_names")


def with_files(sections: Sections, folder: Path) -> tuple[Sections, dict[Path, Any]]:
    """Return the sections with paths of files in a folder in place of rows, and the rows by these paths."""
    data, rows = dict(sections["data"]), dict[Path, Any]()
    for key, name in PATHS.items():
        if key in data and not isinstance(data[key], str | Path):
            path = folder / (f"{name}.parquet" if hasattr(data[key], "to_parquet") else f"{name}.jsonl")
            rows[path], data[key] = data[key], path
    return {**sections, "data": data}, rows


def write_rows(rows: Any, path: Path) -> None:
    """Write rows to a new file.

    Raises:
        DataError: a row holds what JSON has no form for.
        RunFolderError: there is such a file, of another run.
    """
    if path.exists():
        raise RunFolderError(f"{path}: exists, with the rows of another run; choose another folder, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    if hasattr(rows, "to_parquet"):
        rows.to_parquet(str(path))
        return
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            try:
                file.write(json.dumps(row, default=plain) + "\n")
            except (TypeError, ValueError) as error:
                raise DataError(f"data: row {number} cannot be written as JSON: {error}") from error


def config_text(sections: Mapping[str, Any]) -> str:
    """Return the sections as TOML, each on a line.

    Raises:
        ConfigError: a value that TOML has no form for.
    """
    return "".join(f"{name} = {_value(name, section)}\n" for name, section in sections.items())


def override_words(sections: Mapping[str, Any]) -> list[str]:
    """Return the sections as words of a command line, such as `--engine.max_updates=20`."""
    return [
        f"--{name}.{key}={value if isinstance(value, str) else _value(f'{name}.{key}', value)}"
        for name, table in named(sections).items()
        for key, value in table.items()
    ]


def named(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return sections by their names in a file: `async_` is `async`, which Python keeps for itself."""
    return {name.removesuffix("_"): table for name, table in sections.items()}


def _value(key: str, value: Any) -> str:
    try:
        return toml_value(_as_toml(value))
    except TypeError as error:
        raise ConfigError(f"{key}: {error}") from error


def _as_toml(value: Any) -> Any:
    """Return numbers and arrays of numpy as those of Python, wherever they are in it."""
    if isinstance(value, Mapping):
        return {str(key): _as_toml(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_toml(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
