"""The functions that rules look at, read again from the files that matter."""

import ast
import warnings
from collections.abc import Callable, Iterator
from typing import Final

from offbeat_hanglint._program.depend import Dependence
from offbeat_hanglint._program.facts import FunctionFact
from offbeat_hanglint._program.program import Program
from offbeat_hanglint._program.reach import Reach
from offbeat_hanglint._program.view import FunctionView
from offbeat_hanglint._program.walk import Walker

# Last parts of calls that wait, start or set up something: functions with one are looked at, too.
WAITS: Final = frozenset(
    (
        *(
            "get",
            "wait",
            "ready",
            "recv",
            "recv_string",
            "recv_pyobj",
            "recv_multipart",
            "recv_json",
            "join",
            "result",
            "acquire",
            "sleep",
            "init",
            "remote",
        ),
        *(
            "init_process_group",
            "fp8_autocast",
            "convert_sync_batchnorm",
            "Thread",
            "submit",
            "run_in_executor",
            "create_task",
            "get_nowait",
            "communicate",
        ),
    )
)
HANDLES_SIGNALS: Final = frozenset(("signal", "add_signal_handler"))


def views(
    program: Program,
    reach: Reach,
    read: Callable[[str], bytes],
    only: frozenset[str] | None = None,
    too_deep: list[FunctionView] | None = None,
) -> Iterator[FunctionView]:
    """Each function that reaches a collective or waits, file by file; files without one are not read again.

    With `only`, of these paths alone; the rest of the program still counts for what calls reach. `too_deep` is given
    the functions that are nested too deeply to be walked.
    """
    too_deep = [] if too_deep is None else too_deep
    dependence = Dependence(program, reach)
    for number, file in enumerate(program.files):
        if only is not None and file.path not in only:
            continue
        first = program.first[number]
        wanted = {
            i
            for i, f in enumerate(file.functions)
            if reach.of[first + i] or f.is_async or file.sets_hooks or _is_relevant(f, program.placing_classes)
        }
        if not wanted:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(read(file.path))
        except (SyntaxError, ValueError, RecursionError, OSError):
            continue
        by_place = {(f.line, f.name): i for i, f in enumerate(file.functions)}
        for node in _functions(tree):
            index = 0 if isinstance(node, ast.Module) else by_place.get((node.lineno, node.name), -1)
            if index in wanted:
                view = FunctionView(program, reach, dependence, file, first + index, file.functions[index], node)
                try:
                    walked = Walker(view).walk()
                except RecursionError:
                    too_deep.append(view)
                else:
                    yield walked


def _functions(tree: ast.Module) -> Iterator[ast.Module | ast.FunctionDef | ast.AsyncFunctionDef]:
    yield tree
    stack: list[ast.AST] = list(reversed(tree.body))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            stack += [
                c for c in ast.iter_child_nodes(node) if isinstance(c, ast.stmt | ast.excepthandler | ast.match_case)
            ][::-1]


def _is_relevant(function: FunctionFact, placing: frozenset[str]) -> bool:
    """Return whether a function, by its names, waits, sends, computes a source, hands on or takes resources."""
    if ("src" in function.name and "rank" in function.name) or "send" in function.name:
        return True
    for call in function.calls:
        last = call.callee.rsplit(".", 1)[-1]
        if (
            last in WAITS
            or last in HANDLES_SIGNALS
            or last in placing
            or "run" in last
            or "schedule" in last
            or "enqueue" in last
        ):
            return True
    return False
