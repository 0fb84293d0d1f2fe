"""Rows of a data set: read from files, their columns, and their values as plain JSON data.

A column's name may lead into the objects that a row holds: `reward_model.ground_truth` is the part `ground_truth` of
the column `reward_model`, unless a column has that very name.
"""

import difflib
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

from offbeat_core import ConfigError, DataError, path_advice
from offbeat_data._sources.file_forms import name_other_form, name_unknown_form

Row = dict[str, Any]
_FORMS: Final = (
    "a .jsonl or .parquet file, a folder of them, a folder as the Hub has it, with them in data/, or a folder written "
    "by datasets' save_to_disk"
)
_MAX_DEPTH: Final = 100
"""Lists and objects inside each other; Python walks about 300 before it gives up, and fewer deep inside a program."""


# train-00000-of-00002.parquet, test.jsonl. Source: huggingface/datasets, data_files.py, SPLIT_PATTERN_SHARDED and
# SPLIT_KEYWORDS.
_SPLIT: Final = re.compile(
    r"(.+)-\d{5}-of-\d{5}|(train|training|validation|valid|dev|val|test|testing|eval|evaluation)[-.]"
)


def read_rows(path: Path, split: str, limit: int) -> list[Row]:
    """Rows of a file or folder (see `DataConfig.path`), in order, at most `limit` of them where it is not 0."""
    try:
        require_path(path)
        if path.is_dir():
            rows = _read_folder(path, split, limit)
        else:
            refuse_split(path, split)
            rows = _reader(path)([path], limit)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}; give this user the right to, or name other data") from error
    if not rows:
        raise DataError(f"{path} is empty: a data set needs at least one row")
    return rows


def read_files(files: Iterable[Path], limit: int) -> list[Row]:
    """Rows of files of one form, in order, at most `limit` of them where it is not 0: no file is asked for after it."""
    others = iter(files)
    first = next(others)
    rows = _reader(first)(chain([first], others), limit)
    if not rows:
        raise DataError(f"{first} is empty: a data set needs at least one row")
    return rows


def require_path(path: Path, written: str = "") -> None:
    """Refuse a path where nothing is, or no file and no folder: a pipe would be waited for without an end.

    Args:
        path: of rows.
        written: the same as the configuration has it, which advice is about.
    """
    if not path.exists():
        advice = path_advice(written or str(path), is_dataset=True) or f"give {_FORMS}"
        raise DataError(f"data path {path.absolute()} does not exist: {advice}")
    if not (path.is_file() or path.is_dir()):
        raise DataError(
            f"data path {path.absolute()} must be a file or a folder, and is a pipe or a device: give {_FORMS}"
        )


def refuse_split(source: str | Path, split: str) -> None:
    """Refuse to take the same rows for another split than "train", which is what rows without a split are."""
    if split != "train":
        raise ConfigError(
            f"{source} has no splits, and {split!r} would be all of it: leave data.split and data.eval_split out; "
            f"data.eval_size or data.eval_path hold something out"
        )


def _reader(path: Path) -> Callable[[Iterable[Path], int], list[Row]]:
    if path.suffix == ".parquet":
        return _read_parquet
    if path.suffix in (".jsonl", ".ndjson", ".json"):
        return _read_json
    raise DataError(f"{path} {name_unknown_form(path) or f'has an unknown form: give {_FORMS}'}")


def _read_folder(folder: Path, split: str, limit: int) -> list[Row]:
    if (folder / "dataset_dict.json").is_file():
        splits = _json_object(folder / "dataset_dict.json").get("splits", [])
        if split not in splits:
            raise _no_such_split(folder, split, splits)
        return _read_saved_dataset(folder / split, limit)
    if (folder / "state.json").is_file():
        refuse_split(folder, split)
        return _read_saved_dataset(folder, limit)
    for place in (folder, folder / "data"):  # Source: huggingface/datasets, docs, repository_structure
        for suffix in (".parquet", ".jsonl"):
            if files := sorted(place.glob(f"*{suffix}")):
                return _reader(files[0])(_files_of_split(folder, files, split), limit)
    names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8])
    held = f"holds no data set but {names}" if names else "is an empty folder"
    raise DataError(f"{folder} {held}: give {_FORMS}")


def _files_of_split(folder: Path, files: list[Path], split: str) -> list[Path]:
    """Return the files named after the split; all of them where no names distinguish them."""
    if named := [path for path in files if path.name.startswith((f"{split}-", f"{split}."))]:
        return named
    splits = sorted({(found[1] or found[2]) if (found := _SPLIT.match(path.name)) else "" for path in files})
    if len(splits) > 1 or (any(splits) and split != "train"):
        raise _no_such_split(folder, split, [name for name in splits if name])
    refuse_split(folder, split)
    return files


def _no_such_split(folder: Path, split: str, splits: list[str]) -> DataError:
    return DataError(f"{folder} has no split {split!r}: set data.split (data.eval_split) to one of {', '.join(splits)}")


def _read_json(files: Iterable[Path], limit: int) -> list[Row]:
    rows: list[Row] = []
    for path in files:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    rows.append(_parse_line(path, number, line))
                if limit and len(rows) == limit:
                    return rows
    return rows


def _parse_line(path: Path, number: int, line: bytes) -> Row:
    try:
        row = json.loads(line)
        _check_value(row)
    except RecursionError as error:
        raise DataError(f"{path}, line {number}: nested more than {_MAX_DEPTH} levels deep; flatten it") from error
    except UnicodeEncodeError as error:
        # JSON may write "\\ud83d" alone, which no tokenizer takes and no UTF-8 file holds.
        raise DataError(
            f"{path}, line {number}: half a character, a surrogate without its other half ({error}); write it whole"
        ) from error
    except ValueError as error:
        if number == 1 and (form := name_other_form(path, line)):
            raise DataError(f"{path} {form}") from error
        if isinstance(error, UnicodeDecodeError) and error.encoding == "utf-8":
            raise DataError(f"{path}, line {number}: {_not_utf8(path, line[error.start], error.start)}") from error
        raise DataError(f"{path}, line {number}: not valid JSON ({error}); each line needs one JSON object") from error
    if not isinstance(row, dict):
        if number == 1 and (form := name_other_form(path, line)):
            raise DataError(f"{path} {form}")
        raise DataError(f"{path}, line {number}: each line needs one JSON object, got {json_kind(row)}")
    return row


def _not_utf8(path: Path, byte: int, start: int) -> str:
    return (
        f"not UTF-8 text (byte {start + 1} of the line is 0x{byte:02x}); convert the file, for example from Latin-1: "
        f"iconv -f latin1 -t utf-8 {path.name} > utf8-{path.name}"
    )


def _check_value(value: Any, depth: int = 0) -> None:
    if depth > _MAX_DEPTH:
        raise RecursionError
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, dict | list):
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_value(item, depth + 1)


def _read_parquet(files: Iterable[Path], limit: int) -> list[Row]:
    import pyarrow.parquet as pq

    def batches(path: Path) -> Iterator[Any]:
        with pq.ParquetFile(path) as source:
            yield from source.iter_batches()

    return _take_rows(files, batches, limit, "cannot be read as Parquet: {}; write it again")


def _read_saved_dataset(folder: Path, limit: int) -> list[Row]:
    """Read `state.json` and the Arrow files it names; this needs pyarrow and not the library datasets.

    Source: huggingface/datasets, arrow_dataset.py, Dataset.save_to_disk (indices are resolved when saving).
    """
    import pyarrow as pa

    def batches(path: Path) -> Iterator[Any]:
        with pa.memory_map(str(path)) as source:
            yield from pa.ipc.open_stream(source)

    files = [folder / entry["filename"] for entry in _json_object(folder / "state.json").get("_data_files", [])]
    return _take_rows(files, batches, limit, "cannot be read as an Arrow stream: {}; save the data set again")


def _take_rows(
    files: Iterable[Path], batches: Callable[[Path], Iterator[Any]], limit: int, complaint: str
) -> list[Row]:
    """Rows of Arrow batches, in order, at most `limit` of them."""
    import pyarrow as pa

    rows: list[Row] = []
    for path in files:
        try:
            for batch in batches(path):
                rows += batch.to_pylist()
                if limit and len(rows) >= limit:
                    return rows[:limit]
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # Parquet promises no UTF-8 in its texts
            raise DataError(f"{path} {complaint.format(error)}") from error
    return rows


def _json_object(path: Path) -> Row:
    return _parse_line(path, 1, path.read_bytes().replace(b"\n", b" "))


TOOLS: Final = "tools"
_LABELS: Final = ("role", "name", "content")
"""Keys of a message that say nothing besides its content."""


def has_column(row: Row, column: str) -> bool:
    """Return whether a row has a column, or a part of one, of that name; it may be null."""
    return _locate(row, column) is not None


def find_column(row: Row, column: str) -> Any:
    """Return the value of a column or of a part of one; None when there is none, or a number that is none."""
    found = _locate(row, column)
    value = found and found[0][found[1]]
    return None if isinstance(value, float) and math.isnan(value) else value


def without_column(row: Row, column: str) -> Row:
    """Return a row without one column, or without a part of one, such as "reward_model.ground_truth"."""
    if column in row:
        return {name: value for name, value in row.items() if name != column}
    outer, _, inner = column.partition(".")
    part = row.get(outer)
    return {**row, outer: without_column(part, inner)} if inner and isinstance(part, dict) else row


@contextmanager
def naming_row(source: str, number: int) -> Iterator[None]:
    """Name the row in the text of a DataError that comes of it."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{source}, row {number}: {error}") from error


def require_column(row: Row, column: str, setting: str, *, needs: str = "") -> Any:
    """Return the value of a column; a DataError names those that are most like it where there is none.

    Args:
        row: that should have it.
        column: its name, or that of a part of one.
        setting: `data.SETTING` holds the name.
        needs: what a row needs, for data of another kind; the error says it.
    """
    if not has_column(row, column):
        names = list(_names(row))
        near = difflib.get_close_matches(column, names, n=3, cutoff=0.4)
        advice = f"; set data.{setting} to one of them" + (f", perhaps {', '.join(near)}" if near else "")
        advice = f"; {needs}" if needs else advice
        raise DataError(f"no column {column!r}, it has {', '.join(names) or 'none'}{advice}")
    value = find_column(row, column)
    if value is None:
        raise DataError(f"column {column!r} (data.{setting}) is null; fill it in or drop the row")
    return value


def _locate(row: Row, column: str) -> tuple[Row, str] | None:
    """Return the object that holds it, and its key there."""
    if column in row:
        return row, column
    outer, _, inner = column.partition(".")
    part = row.get(outer)
    return _locate(part, inner) if inner and isinstance(part, dict) else None


def _names(row: Row) -> Iterator[str]:
    """All columns, each followed by its parts."""
    for column, value in row.items():
        yield column
        if isinstance(value, dict):
            yield from (f"{column}.{part}" for part in _names(value))


def as_text(value: Any) -> str:
    """Return a text as it is; any other value as JSON, so that 18 is "18" and [1, 2] is "[1, 2]"."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def as_messages(value: Any, what: str = "") -> list[dict[str, Any]]:
    """Chat messages without the empty keys that columnar files put into each; one that calls tools may lack content.

    Args:
        value: of a row.
        what: its place, where a text would do as well, such as "column 'prompt'"; for errors.
    """
    if not isinstance(value, list) or not value:
        wanted = f"{what} must be text or chat messages, a list" if what else "chat messages must be a list"
        raise DataError(f"{wanted} of at least one, got {json_kind(value)}{_storage_advice(value)}")
    for message in value:
        if (problem := _problem_of(message)) is not None:
            raise DataError(problem)
    return [{key: item for key, item in message.items() if item is not None or key == "content"} for message in value]


def as_question(value: Any) -> Any:
    """Return what a row asks where that is text or chat messages, else None: the row is refused when it is rendered."""
    is_chat = isinstance(value, list) and value and all(_problem_of(message) is None for message in value)
    return value if isinstance(value, str) or is_chat else None


def _problem_of(message: Any) -> str | None:
    """Say what is wrong with a chat message; None for nothing."""
    speaks = isinstance(message, dict) and ("content" in message or message.get("tool_calls"))
    if not speaks or not isinstance(message.get("role"), str):
        return f"a chat message needs role and content, got {message!r:.80}{_renaming_advice(message)}"
    content = message.get("content")
    # Beside a content of null may be calls of tools, or thoughts. Alone, templates write it as the word "None".
    others = (item for key, item in message.items() if key not in _LABELS)
    if content is None and not any(isinstance(item, str | list | dict) and item for item in others):
        return f"the content of a message of {message['role']!r} is null; fill it in or drop the row"
    if not isinstance(content, str | list | dict | None):
        return (
            f"the content of a chat message must be text or a list of parts, got {json_kind(content)}; write it as text"
        )
    return None


def _renaming_advice(message: Any) -> str:
    """Say what to do with messages as ShareGPT has them."""
    if isinstance(message, dict) and {"from", "value"} <= message.keys():
        return "; rename from to role (human to user, gpt to assistant) and value to content"
    return ""


def _storage_advice(value: Any) -> str:
    if isinstance(value, str) and value.lstrip().startswith("["):
        return ", which looks like JSON; store the list itself"
    if isinstance(value, bytes):
        return "; store texts as strings"
    return "; put the message into a list" if isinstance(value, dict) else ""


def json_kind(value: Any) -> str:
    """Say what a value is in the words of JSON, such as "the number 3"."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | dict) and not value:
        return "an empty list" if isinstance(value, list) else "an empty object"
    kinds = {str: "text ", int: "number ", float: "number ", bytes: "bytes ", list: "list ", dict: "object "}
    return f"the {kinds.get(type(value), '')}{value!r:.80}"


def with_tools(row: Row, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Variables of the chat template, with the tools of the row's column `tools`: a list, or one in JSON."""
    tools = row.get(TOOLS)
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            tools = {}
    if not tools and not isinstance(tools, dict):
        return options
    if not isinstance(tools, list):
        raise DataError(
            f"column tools must be a list of function schemas, or one in JSON, got {row[TOOLS]!r:.80}; mend it, or "
            "rename a column that is something else"
        )
    return {"tools": tools, **options}


def with_system(messages: list[dict[str, Any]], system_prompt: str) -> list[dict[str, Any]]:
    """Put the system prompt first, unless the conversation has one of its own."""
    if not system_prompt or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def to_plain(value: Any) -> Any:
    """Lists, dicts with text keys, texts, numbers, booleans and None; anything else becomes its text.

    NaN and infinities, which JSON does not have, become None.
    What is plain already, as most rows are, is given back itself and not copied.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, dict):
        made = {str(key): to_plain(item) for key, item in value.items()}
        return value if all(made.get(key, made) is item for key, item in value.items()) else made
    if isinstance(value, list | tuple):
        items = [to_plain(item) for item in value]
        is_same = isinstance(value, list) and all(map(operator.is_, items, value))
        return value if is_same else items
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else str(value)


def pack(value: Any) -> Any:
    """Rewrite tuples and dicts with keys other than text, which JSON would change without a word.

    reasoning-gym's arc_agi gives the right answer a score of 0.05 when its grids come back as lists.
    """
    if isinstance(value, tuple):
        return {"__tuple__": [pack(item) for item in value]}
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: pack(item) for key, item in value.items()}
        return {"__items__": [[pack(key), pack(item)] for key, item in value.items()]}
    return value


def unpack(value: Any) -> Any:
    """Return what `pack` was given."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"__tuple__"}:
            return tuple(unpack(item) for item in value["__tuple__"])
        if value.keys() == {"__items__"}:
            return {unpack(key): unpack(item) for key, item in value["__items__"]}
        return {key: unpack(item) for key, item in value.items()}
    return value
