"""Records the interface of a released package as data, by reading its source, and says what has changed since.

    python tools/record_api.py record WANTED.json SOURCES -o RECORD.json
    python tools/record_api.py compare RECORD.json NEWER.json

WANTED names the package, its version and repository, and for each source file the classes, functions and constants of
interest; SOURCES is a checkout or an unpacked wheel of that version. Nothing of the package is imported or run: an
engine that cannot be installed here is recorded all the same. A record holds signatures, fields and HTTP routes, never
bodies.
"""

import argparse
import ast
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

Json = dict[str, Any]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign

HTTP_METHODS: Final = frozenset({"get", "post", "put", "delete", "patch"})


class RecordingError(Exception):
    """A wanted name that is not in the source."""


def record(wanted: Json, sources: Path) -> Json:
    """Read what is wanted out of the source files.

    Args:
        wanted: package, version, repository; files: path -> {commit, symbols, reads}, further keys are kept; `reads`
            names mappings whose keys are of interest: those that the file reads by `.get("KEY")` or `.getenv("KEY")`.
        sources: folder to which the paths are relative.

    Raises:
        RecordingError: a file or a symbol is missing, with all that are.
    """
    missing: list[str] = []
    files: Json = {}
    for path, entry in wanted["files"].items():
        file = sources / path
        if not file.is_file():
            missing.append(path)
            continue
        source = file.read_text()
        tree = ast.parse(source)
        found = dict(_definitions(tree.body))
        missing += [f"{path}: {name}" for name in entry["symbols"] if name not in found]
        symbols = {name: describe(found[name]) for name in entry["symbols"] if name in found}
        digest = hashlib.sha256(source.encode()).hexdigest()
        files[path] = {**entry, "sha256": digest, "symbols": symbols}
        if "reads" in entry:
            files[path]["reads"] = {mapping: _keys_read(tree, mapping) for mapping in entry["reads"]}
    if missing:
        raise RecordingError(f"not in {wanted['package']} {wanted['version']}: {', '.join(missing)}")
    return {**wanted, "files": files}


def describe(node: Definition) -> Json:
    """Return the interface of one definition, as plain data."""
    if isinstance(node, ast.ClassDef):
        return _describe_class(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _describe_function(node)
    return {"kind": "constant", "value": _text(node.value)}


def compare(old: Json, new: Json) -> list[str]:
    """Return what a caller written against `old` may stumble over in `new`, one line each; additions are no harm."""
    found: list[str] = []
    for path, entry in old["files"].items():
        newer = new["files"].get(path)
        if newer is None:
            found.append(f"{path}: gone")
            continue
        for name, symbol in entry["symbols"].items():
            if name not in newer["symbols"]:
                found.append(f"{path}: {name} is gone")
            else:
                found += [f"{path}: {line}" for line in _compare_symbol(name, symbol, newer["symbols"][name])]
    return found


def names_of(symbol: Json) -> set[str]:
    """Return everything a caller can name of a recorded symbol: parameters, fields, members, methods and routes."""
    parameters = {each["name"] for each in symbol.get("parameters", [])}
    return parameters | {*symbol.get("fields", {}), *symbol.get("methods", {}), *symbol.get("routes", {})}


def find_symbol(recorded: Json, path: str, dotted: str) -> Json | None:
    """Return a recorded symbol by its name, such as `Class.method`; None if it was not recorded."""
    name, _, method = dotted.partition(".")
    symbol: Json | None = recorded["files"].get(path, {"symbols": {}})["symbols"].get(name)
    if symbol is None or not method:
        return symbol
    described: Json | None = symbol.get("methods", {}).get(method)
    return described


def _definitions(body: Sequence[ast.stmt]) -> Iterator[tuple[str, Definition]]:
    """Yield what a module defines, under `if`, `try` and `with` too; of one name the last counts."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case ast.If() | ast.Try() | ast.With():
                for part in ("body", "orelse", "finalbody"):
                    yield from _definitions(getattr(node, part, ()))
                for handler in getattr(node, "handlers", ()):
                    yield from _definitions(handler.body)


def _keys_read(tree: ast.AST, mapping: str) -> list[str]:
    """Return constant keys that are read from the mapping of this name."""
    keys = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(ast.Name(name), "get" | "getenv"), args=[ast.Constant(str(key)), *_]):
                if name == mapping:
                    keys.add(key)
    return sorted(keys)


def _describe_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Json:
    return {
        "kind": "async function" if isinstance(node, ast.AsyncFunctionDef) else "function",
        "parameters": list(_parameters(node.args)),
        "returns": _text(node.returns),
        "decorators": [ast.unparse(each) for each in node.decorator_list],
    }


def _parameters(arguments: ast.arguments) -> Iterator[Json]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(positional, defaults, strict=True):
        kind = "positional" if argument in arguments.posonlyargs else "either"
        yield _parameter(argument, kind, default)
    if arguments.vararg:
        yield _parameter(arguments.vararg, "rest", None)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(argument, "keyword", default)
    if arguments.kwarg:
        yield _parameter(arguments.kwarg, "keywords", None)


def _parameter(argument: ast.arg, kind: str, default: ast.expr | None) -> Json:
    described = {
        "name": argument.arg,
        "kind": kind,
        "annotation": _text(argument.annotation),
        "default": _text(default),
    }
    return {key: value for key, value in described.items() if value is not None}


def _describe_class(node: ast.ClassDef) -> Json:
    fields: Json = {}
    methods: Json = {}
    for child in node.body:
        match child:
            case ast.AnnAssign(target=ast.Name(id=name)):
                fields[name] = {"annotation": ast.unparse(child.annotation), "default": _text(child.value)}
            case ast.Assign(targets=[ast.Name(id=name)]):
                fields[name] = {"default": ast.unparse(child.value)}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                methods[name] = _describe_function(child)
    return {
        "kind": "class",
        "bases": [ast.unparse(each) for each in node.bases],
        "fields": fields,
        "methods": methods,
        "routes": dict(_routes(node)),
    }


def _routes(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Return routes that a class adds: `app.add_api_route("/x", handler, methods=["POST"])` and `@app.post("/x")`."""
    for child in ast.walk(node):
        match child:
            case ast.Call(func=ast.Attribute(attr="add_api_route"), args=[ast.Constant(value=str(path)), handler]):
                methods = next((word.value for word in child.keywords if word.arg == "methods"), None)
                for method in ast.literal_eval(methods) if methods else ["GET"]:
                    yield f"{method} {path}", ast.unparse(handler)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                for decorator in child.decorator_list:
                    match decorator:
                        case ast.Call(func=ast.Attribute(attr=method), args=[ast.Constant(value=str(path)), *_]):
                            if method in HTTP_METHODS:
                                yield f"{method.upper()} {path}", name


def _text(node: ast.expr | None) -> str | None:
    return None if node is None else ast.unparse(node)


def _compare_symbol(name: str, old: Json, new: Json) -> Iterator[str]:
    if old["kind"] != new["kind"]:
        yield f"{name} was a {old['kind']}, and is a {new['kind']}"
        return
    if old.get("value") != new.get("value"):
        yield f"{name} was {old.get('value')}, and is {new.get('value')}"
    yield from _compare_parameters(name, old.get("parameters", []), new.get("parameters", []))
    for kind in ("fields", "routes"):
        for key, value in old.get(kind, {}).items():
            if key not in new.get(kind, {}):
                yield f"{name}: {kind[:-1]} {key} is gone"
            elif kind == "fields" and value.get("default") != new[kind][key].get("default"):
                yield f"{name}: {key} was {value.get('default')} by default, and is {new[kind][key].get('default')}"
    for key, value in old.get("methods", {}).items():
        if key not in new.get("methods", {}):
            yield f"{name}.{key} is gone"
        else:
            yield from _compare_symbol(f"{name}.{key}", value, new["methods"][key])


def _compare_parameters(name: str, old: list[Json], new: list[Json]) -> Iterator[str]:
    before, after = ({each["name"]: each for each in side} for side in (old, new))
    takes_any = any(each["kind"] == "keywords" for each in new)
    for key, value in before.items():
        if key not in after:
            if not takes_any:
                yield f"{name}: parameter {key} is gone"
        elif value.get("default") != after[key].get("default"):
            yield f"{name}: {key} was {value.get('default')} by default, and is {after[key].get('default')}"
        elif value["kind"] != after[key]["kind"]:
            yield f"{name}: {key} was {value['kind']}, and is {after[key]['kind']}"
    for key, value in after.items():
        if key not in before and "default" not in value and value["kind"] not in {"rest", "keywords"}:
            yield f"{name}: parameter {key} is new and has no default"
    shared = [key for key in before if key in after]
    if shared != [key for key in after if key in before]:
        yield f"{name}: the order of its parameters was {', '.join(shared)}"


def main() -> int:
    """Read the command line; 1 when something is missing or has changed."""
    parser = argparse.ArgumentParser(
        description="Record a package's interface from its source, or compare two records."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("wanted", type=Path)
    recording.add_argument("sources", type=Path)
    recording.add_argument("-o", "--output", type=Path, required=True)
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    words = parser.parse_args()
    if words.command == "record":
        try:
            recorded = record(json.loads(words.wanted.read_text()), words.sources)
        except RecordingError as error:
            print(error, file=sys.stderr)
            return 1
        words.output.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
        return 0
    changes = compare(json.loads(words.old.read_text()), json.loads(words.new.read_text()))
    print("\n".join(changes) or "nothing that a caller would stumble over")
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
