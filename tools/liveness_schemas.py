"""Writes the JSON schemas of what offbeat-liveness dumps, from its dataclasses.

python tools/liveness_schemas.py            write them anew
python tools/liveness_schemas.py --check    say whether they are up to date
"""

import argparse
import dataclasses
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any, Final

from workspace import ROOT

from offbeat_liveness import ProcessSnapshot, Verdict

FOLDER: Final = ROOT / "packages" / "liveness" / "src" / "offbeat_liveness"
SCHEMAS: Final = {
    "head.schema.json": (ProcessSnapshot, "The state of one process, as offbeat liveness dumps it", ()),
    "verdict.schema.json": (Verdict, "A verdict of offbeat liveness", ("text",)),
}
PLAIN: Final = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}


def schema_of(kind: type, title: str, more: tuple[str, ...]) -> dict[str, Any]:
    """JSON schema of a dataclass as it is dumped: with its format, and with texts that are made of it."""
    parts: dict[str, Any] = {}
    whole = _of_class(kind, parts)
    whole["properties"] = {"format": {"const": 1}, **whole["properties"], **{name: {"type": "string"} for name in more}}
    whole["required"] = list(whole["properties"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **whole, "$defs": parts}


def _of_class(kind: type, parts: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    properties = {each.name: _of_hint(hints[each.name], parts) for each in dataclasses.fields(kind)}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _of_hint(hint: Any, parts: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _of_hint(arguments[0], parts)}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_of_hint(each, parts) for each in arguments]}
    if hint.__name__ not in parts:
        parts[hint.__name__] = {}  # entered first: a head may hold heads
        parts[hint.__name__] = _of_class(hint, parts)
    return {"$ref": f"#/$defs/{hint.__name__}"}


def texts() -> dict[Path, str]:
    """What each schema file is to hold."""
    return {FOLDER / name: json.dumps(schema_of(*each), indent=2) + "\n" for name, each in SCHEMAS.items()}


def main() -> int:
    """Run the command; 1 where a file is out of date and was not to be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    stale = [path for path, text in texts().items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is out of date" if is_check else f"written: {path.relative_to(ROOT)}")
        if not is_check:
            path.write_text(texts()[path])
    return 1 if stale and is_check else 0


if __name__ == "__main__":
    sys.exit(main())
