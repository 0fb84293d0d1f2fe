"""Files that are not what their name says, recognised by their first bytes, with the line that converts them."""

import json
from pathlib import Path
from typing import Final

_PACKED: Final = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ\x00": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"PK\x03\x04": "unzip",
}
_PACKED_SUFFIXES: Final = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd", ".zip": "unzip"}
_COLUMNS_APART: Final = {".csv": "", ".tsv": ", parse_options=csv.ParseOptions(delimiter='\\t')"}
_MARKS_OF_UTF16: Final = (b"\xff\xfe", b"\xfe\xff")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


def name_other_form(path: Path, line: bytes) -> str:
    """Say what a file is that should hold a JSON object a line and does not.

    Args:
        path: of the file.
        line: its first.

    Returns:
        What it is and what converts it, to go behind the path; empty where it has no name.
    """
    if tool := next((tool for start, tool in _PACKED.items() if line.startswith(start)), ""):
        return _unpack_advice(tool)
    if line.startswith(b"PAR1"):
        return "is Parquet: give it the ending .parquet"
    if line.startswith(_MARKS_OF_UTF16) or b"\0" in line[:4]:
        return f"is UTF-16, not UTF-8 text; convert it: iconv -f utf-16 -t utf-8 {path.name} > utf8-{path.name}"
    text = line.removeprefix(_BYTE_ORDER_MARK).strip()
    if text.startswith(b"[") and _holds_objects(text):
        return (
            f"is one JSON array, and each line needs one JSON object; convert it: jq -c '.[]' {path.name} > rows.jsonl"
        )
    if text == b"{":
        return f"has objects over several lines, and each line needs a whole one; convert it: {_on_lines(path)}"
    return ""


def name_unknown_form(path: Path) -> str:
    """Say of a file, by its ending, what makes one of it that can be read; empty where that is not known."""
    if tool := _PACKED_SUFFIXES.get(path.suffix):
        return _unpack_advice(tool)
    if (options := _COLUMNS_APART.get(path.suffix)) is not None:
        program = (
            "from pyarrow import csv, parquet; "
            f"parquet.write_table(csv.read_csv('{path.name}'{options}), '{path.stem}.parquet')"
        )
        return f'has an unknown form; convert it: python -c "{program}"'
    return ""


def _unpack_advice(tool: str) -> str:
    return f"is compressed; unpack it with {tool}, and give what comes out"


def _on_lines(path: Path) -> str:
    return f"jq -c . {path.name} > rows.jsonl"


def _holds_objects(text: bytes) -> bool:
    """Return whether this is an array of objects, or the first line of an array over several lines."""
    try:
        return any(isinstance(item, dict) for item in json.loads(text))
    except ValueError:
        return True
