"""Rows from files: JSON lines, Parquet, and the folders that datasets' `save_to_disk` writes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from offbeat_types import DataError

Row = dict[str, Any]

_FORMS: Final = "a .jsonl or .parquet file, a folder of them, or a folder written by datasets' save_to_disk"


def read_rows(path: Path, split: str, limit: int) -> list[Row]:
    """Rows of a data set, in order.

    Args:
        path: a file or a folder, see `DataConfig.path`.
        split: which one to read where a folder holds several.
        limit: rows at most; 0 for all.

    Raises:
        DataError: no such path, an unknown form, broken content (with its line), no such split, or no rows.
    """
    if not path.exists():
        raise DataError(f"data path {path} does not exist: give {_FORMS}")
    rows = _read_folder(path, split, limit) if path.is_dir() else _reader(path)([path], limit)
    if not rows:
        raise DataError(f"{path} is empty: a data set needs at least one row")
    return rows


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
            raise DataError(f"{folder} has no split {split!r}: set data.split to one of {', '.join(splits)}")
        folder = folder / split
    if (folder / "state.json").is_file():
        return _read_saved_dataset(folder, limit)
    for suffix in (".parquet", ".jsonl"):
        if files := sorted(folder.glob(f"*{suffix}")):
            return _reader(files[0])(files, limit)
    names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
    raise DataError(f"{folder} holds no data set but {names}: give {_FORMS}")


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
    except ValueError as error:
        raise DataError(f"{path}, line {number}: not valid JSON ({error}); each line needs one JSON object") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}: each line needs one JSON object, got {type(row).__name__}")
    return row


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
        except (pa.ArrowException, OSError) as error:
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
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as an Arrow stream: {error}; save the data set again") from error
    return rows


def _json_object(path: Path) -> Row:
    return _parse_line(path, 1, path.read_bytes().replace(b"\n", b" "))
