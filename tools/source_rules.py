"""Rules of the house that no linter knows, each a pure function from source to the places that break it."""

import ast
import re
from collections.abc import Iterator
from typing import Final

MAX_FILE_LINES: Final = 600
MAX_FUNCTION_LINES: Final = 80
CATCH_ALL_NAMES: Final = frozenset({"util", "utils", "helper", "helpers", "common", "misc"})
UNSAFE_FORMATS: Final = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})

# Brackets around one letter keep these lines from matching themselves.
_MACHINE_PATH: Final = re.compile(r"(?<![\w.])/(?:[w]ork|[r]oot|[o]pt)/")
_REGISTRY: Final = re.compile(
    r"https?://\S+/(?:simple|packages)/|[p]ypi\.org|[p]ythonhosted\.org|registry\.[n]pmjs|[d]eb\.debian\.org"
)
_ONE_PLATFORM: Final = re.compile(r"(?<![a-z])(?:[n]pu|[h]ccl|[a]scend)(?![a-z])", re.IGNORECASE)


def _matching(pattern: re.Pattern[str], text: str) -> list[str]:
    """`line N: what` for every line that the pattern finds something in."""
    lines = enumerate(text.splitlines(), start=1)
    return [f"line {number}: {found.group()}" for number, line in lines if (found := pattern.search(line))]


def machine_addresses(text: str) -> list[str]:
    """Paths of one machine and addresses of registries: true here, wrong or private elsewhere."""
    return _matching(_MACHINE_PATH, text) + _matching(_REGISTRY, text)


def platform_words(text: str) -> list[str]:
    """Words of one accelerator family, which belong behind the device seam, in one package."""
    return _matching(_ONE_PLATFORM, text)


def is_catch_all(module: str) -> bool:
    """Whether a module's or a folder's name says nothing, such as `_utils`."""
    return module.strip("_") in CATCH_ALL_NAMES


def too_long(source: str) -> list[str]:
    """The file, and functions in it, over the hard limits."""
    num_lines = len(source.splitlines())
    found = [f"the file has {num_lines} lines, over {MAX_FILE_LINES}"] if num_lines > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"line {node.lineno}: {node.name} has {length} lines, over {MAX_FUNCTION_LINES}")
    return found


def imported_modules(source: str) -> set[str]:
    """Top-level names of everything a file imports absolutely, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def unsafe_loading(source: str) -> list[str]:
    """Formats that run code while loading: pickle and its kin, torch.load of anything but weights, numpy objects."""
    found = [f"imports {name}" for name in sorted(imported_modules(source) & UNSAFE_FORMATS)]
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        options = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
        if ast.unparse(node.func) == "torch.load" and options.get("weights_only") is not True:
            found.append(f"line {node.lineno}: torch.load without weights_only=True")
        if options.get("allow_pickle") is True:
            found.append(f"line {node.lineno}: allow_pickle=True")
    return found


def _names(expression: ast.expr | None) -> Iterator[str]:
    """Names of the exceptions a handler catches; a bare `except` counts as BaseException."""
    if expression is None:
        yield "BaseException"
    elif isinstance(expression, ast.Tuple):
        yield from (ast.unparse(element) for element in expression.elts)
    else:
        yield ast.unparse(expression)


def _does_nothing(body: list[ast.stmt]) -> bool:
    """Whether a handler's body is only `pass`, `continue` or `...`."""
    return all(ast.unparse(line) in {"pass", "continue", "..."} for line in body)


def swallowed_errors(source: str) -> list[str]:
    """Handlers that catch everything and do nothing, and `suppress(Exception)`."""
    everything = {"Exception", "BaseException"}
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ExceptHandler(type=caught, body=body) if everything & set(_names(caught)) and _does_nothing(body):
                found.append(f"line {node.lineno}: catches everything and does nothing")
            case ast.Call(func=called, args=caught) if everything & {ast.unparse(one) for one in caught}:
                if ast.unparse(called).split(".")[-1] == "suppress":
                    found.append(f"line {node.lineno}: suppresses everything")
    return found


def backend_branches(source: str) -> list[str]:
    """Comparisons of a backend's name with a literal: backends are found by entry point, never by name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left=left, comparators=[ast.Constant(value=str())]):
                if re.search(r"(^|[._])backend$", ast.unparse(left)):
                    found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found
