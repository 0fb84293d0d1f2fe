"""Rows from files: JSON lines, Parquet, and the folders that datasets' `save_to_disk` writes."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from offbeat_types import ConfigError, DataError

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
    """Rows of a data set, in order.

    Args:
        path: a file or a folder, see `DataConfig.path`.
        split: which one to read where a folder holds several.
        limit: rows at most; 0 for all.

    Raises:
        DataError: no such path, an unknown form, broken content (with its line), no such split, or no rows.
        ConfigError: a split other than "train" of what has no splits.
    """
    try:
        if not path.exists():
            raise DataError(f"data path {path} does not exist: give {_FORMS}")
        rows = _read_folder(path, split, limit) if path.is_dir() else _read_file(path, split, limit)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}; give this user the right to, or name other data") from error
    if not rows:
        raise DataError(f"{path} is empty: a data set needs at least one row")
    return rows


def refuse_split(source: str | Path, split: str) -> None:
    """Refuse to take the same rows for another split.

    Raises:
        ConfigError: the split is not "train", which is what rows without a split are.
    """
    if split != "train":
        raise ConfigError(
            f"{source} has no splits, and {split!r} would be all of it: leave data.split and data.eval_split out; "
            f"data.eval_size or data.eval_path hold something out"
        )


def _read_file(path: Path, split: str, limit: int) -> list[Row]:
    refuse_split(path, split)
    return _reader(path)([path], limit)


def _reader(path: Path) -> Callable[[list[Path], int], list[Row]]:
    if path.suffix == ".parquet":
        return _read_parquet
    if path.suffix in (".jsonl", ".ndjson", ".json"):
        return _read_json
    raise DataError(f"{path} has an unknown form: give {_FORMS}")


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
    names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
    raise DataError(f"{folder} holds no data set but {names}: give {_FORMS}")


def _files_of_split(folder: Path, files: list[Path], split: str) -> list[Path]:
    """The files named after the split; all of them where no names tell them apart."""
    if named := [path for path in files if path.name.startswith((f"{split}-", f"{split}."))]:
        return named
    splits = sorted({(found[1] or found[2]) if (found := _SPLIT.match(path.name)) else "" for path in files})
    if len(splits) > 1 or (any(splits) and split != "train"):
        raise _no_such_split(folder, split, [name for name in splits if name])
    refuse_split(folder, split)
    return files


def _no_such_split(folder: Path, split: str, splits: list[str]) -> DataError:
    return DataError(f"{folder} has no split {split!r}: set data.split (data.eval_split) to one of {', '.join(splits)}")


def _read_json(files: list[Path], limit: int) -> list[Row]:
    rows: list[Row] = []
    for path in files:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if limit and len(rows) == limit:
                    return rows
                if line.strip():
                    rows.append(_parse_line(path, number, line))
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
        raise DataError(f"{path}, line {number}: not valid JSON ({error}); each line needs one JSON object") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}: each line needs one JSON object, got {type(row).__name__}")
    return row


def _check_value(value: Any, depth: int = 0) -> None:
    if depth > _MAX_DEPTH:
        raise RecursionError
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, dict | list):
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_value(item, depth + 1)


def _read_parquet(files: list[Path], limit: int) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[Row] = []
    for path in files:
        try:
            with pq.ParquetFile(path) as source:
                for batch in source.iter_batches():
                    rows += batch.to_pylist()
                    if limit and len(rows) >= limit:
                        return rows[:limit]
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # Parquet promises no UTF-8 in its texts
            raise DataError(f"{path} cannot be read as Parquet: {error}; write it again") from error
    return rows


def _read_saved_dataset(folder: Path, limit: int) -> list[Row]:
    """Read `state.json` and the Arrow files it names; this needs pyarrow and not the library datasets.

    Source: huggingface/datasets, arrow_dataset.py, Dataset.save_to_disk (indices are resolved when saving).
    """
    import pyarrow as pa

    rows: list[Row] = []
    for entry in _json_object(folder / "state.json").get("_data_files", []):
        path = folder / entry["filename"]
        try:
            with pa.memory_map(str(path)) as source:
                for batch in pa.ipc.open_stream(source):
                    rows += batch.to_pylist()
                    if limit and len(rows) >= limit:
                        return rows[:limit]
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read as an Arrow stream: {error}; save the data set again") from error
    return rows


def _json_object(path: Path) -> Row:
    return _parse_line(path, 1, path.read_bytes().replace(b"\n", b" "))
