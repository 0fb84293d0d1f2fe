"""Rules of the house that no linter knows, each a pure function from source to the places that break it."""

import ast
import re
from collections.abc import Iterator
from typing import Final

MAX_FILE_LINES: Final = 600
MAX_FUNCTION_LINES: Final = 80
CATCH_ALL_NAMES: Final = frozenset({"util", "utils", "helper", "helpers", "common", "misc"})
DEVICE_KINDS: Final = ("cuda", "cpu")
UNSAFE_FORMATS: Final = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})

# Brackets around one letter keep these lines from matching themselves.
_MACHINE_PATH: Final = re.compile(r"(?<![\w.])/(?:[w]ork|[r]oot|[o]pt)/")
_REGISTRY: Final = re.compile(
    r"https?://\S+/(?:simple|packages)/|[p]ypi\.org|[p]ythonhosted\.org|registry\.[n]pmjs|[d]eb\.debian\.org"
)
_WORD: Final = re.compile(r"[A-Z]+s?(?![a-z])|[A-Z]?[a-z]+")
"""One word of a name: `openGPUs_InTurns` holds open, GPUs, In and Turns."""
_ONE_PLATFORM: Final = frozenset({"n" + "pu", "n" + "pus", "h" + "ccl", "a" + "scend"})


def _matching(pattern: re.Pattern[str], text: str) -> list[str]:
    """Return `line N: what` for every line in which the pattern matches."""
    lines = enumerate(text.splitlines(), start=1)
    return [f"line {number}: {found.group()}" for number, line in lines if (found := pattern.search(line))]


def machine_addresses(text: str) -> list[str]:
    """Find paths of one machine and addresses of registries: right here, wrong or private elsewhere."""
    return _matching(_MACHINE_PATH, text) + _matching(_REGISTRY, text)


def platform_words(text: str) -> list[str]:
    """Find words of one accelerator family, which belong behind the device seam, in one package."""
    lines = enumerate(text.splitlines(), start=1)
    return [
        f"line {number}: {word}"
        for number, line in lines
        for word in _WORD.findall(line)
        if word.lower() in _ONE_PLATFORM
    ]


def is_catch_all(module: str) -> bool:
    """Return whether a module's or a folder's name says nothing, such as `_utils`."""
    return module.strip("_") in CATCH_ALL_NAMES


def too_long(source: str) -> list[str]:
    """Return the file, and functions in it, over the hard limits."""
    num_lines = len(source.splitlines())
    found = [f"the file has {num_lines} lines, over {MAX_FILE_LINES}"] if num_lines > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"line {node.lineno}: {node.name} has {length} lines, over {MAX_FUNCTION_LINES}")
    return found


def imported_modules(source: str) -> set[str]:
    """Return top-level names of everything a file imports absolutely, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def unsafe_loading(source: str) -> list[str]:
    """Find formats that run code while loading: pickle and the like, torch.load of more than weights, numpy objects."""
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
    """Return names of the exceptions a handler catches; a bare `except` counts as BaseException."""
    if expression is None:
        yield "BaseException"
    elif isinstance(expression, ast.Tuple):
        yield from (ast.unparse(element) for element in expression.elts)
    else:
        yield ast.unparse(expression)


def _does_nothing(body: list[ast.stmt]) -> bool:
    """Return whether a handler's body is only `pass`, `continue` or `...`."""
    return all(ast.unparse(line) in {"pass", "continue", "..."} for line in body)


def swallowed_errors(source: str) -> list[str]:
    """Find handlers that catch everything and do nothing, and `suppress(Exception)`."""
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
    """Find comparisons of a backend's name with a literal: backends are found by entry point, never by name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left=left, comparators=[ast.Constant(value=str())]):
                if re.search(r"(^|[._])backend$", ast.unparse(left)):
                    found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def named_devices(source: str) -> list[str]:
    """Find places that name a kind of device, or ask torch about one: only the device seam knows kinds.

    Main memory is every device's neighbour, so moving a tensor there or asking whether it is there is left alone; and
    so are settings: a name that a user may give is given to the seam.
    """
    nodes = [node for node in ast.walk(ast.parse(source)) if _names_device(node)]
    return [f"line {node.lineno}: {ast.unparse(node)}" for node in nodes if isinstance(node, ast.expr | ast.stmt)]


def _names_device(node: ast.AST) -> bool:
    """Return whether it is a node that does, itself."""
    match node:
        case ast.Attribute(value=ast.Name("torch"), attr="cuda") | ast.Attribute(attr="is_cuda"):
            return True
        case ast.ImportFrom(module=module, names=names):
            return (module or "").startswith("torch.cuda") or (module == "torch" and "cuda" in {n.name for n in names})
        case ast.Import(names=names):
            return any(name.name.startswith("torch.cuda") for name in names)
        case ast.Compare(left=ast.Attribute(attr="type"), comparators=[other]):
            return _is_kind(other, DEVICE_KINDS)
        case ast.Call(func=called, args=arguments, keywords=keywords):
            name = ast.unparse(called)
            placed = [word.value for word in keywords if word.arg == "device"]
            kinds = DEVICE_KINDS if name.startswith("torch.") else DEVICE_KINDS[:1]
            placed += arguments[:1] if name == "torch.device" or name.endswith(".to") else []
            return name.endswith(".cuda") or any(_is_kind(value, kinds) for value in placed)
    return False


def _is_kind(value: ast.expr, kinds: tuple[str, ...]) -> bool:
    """Return whether it is a literal such as "cuda" or "cuda:1", or an f-string that begins so."""
    if isinstance(value, ast.JoinedStr) and value.values:
        value = value.values[0]
    return isinstance(value, ast.Constant) and str(value.value).partition(":")[0] in kinds


def first_words(text: str) -> list[tuple[int, str]]:
    """Return the first word of each docstring, those of constants and fields included, with its line."""
    texts = [
        (node.lineno, node.value.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return [(line, held.split()[0].rstrip(",:;.")) for line, held in texts if held.split()]


def parsed_errors(text: str) -> list[str]:
    """Return comparisons of a text with that of an error, such as `"refused" in str(error)`."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn)
        if re.fullmatch(r"str\((\w*error|exception|exc|failure)\)", ast.unparse(node.comparators[0]))
    ]


def imported_rooms(text: str, package: str) -> set[str]:
    """Return the folders and modules directly below a package that a module of it imports from."""
    modules = (node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module)
    return {module.split(".")[1] for module in modules if module.startswith(f"{package}.")}
