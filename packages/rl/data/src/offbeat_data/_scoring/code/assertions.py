"""Runs the assertions of a row against a program, in another process than the program's.

A sandbox of one's own has `run` alone. There both processes are in one sandbox, and the one with the tests closes its
memory to the other.
"""

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from offbeat_data._scoring.code.tests import names_used
from offbeat_data._scoring.sandbox.sandbox import SOCKET_VARIABLE, BubblewrapSandbox, Sandbox
from offbeat_data._scoring.sandbox.watching import ProgramRun

_PACKAGE: Final = "offbeat_data._scoring.sandbox."
_FOLDER: Final = Path(__file__).parents[1] / "sandbox"
_KEY_BYTES: Final = 32
_READ_TO: Final = ("exited", "timed_out")
"""Ends of a run up to which tests count."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of the assertions of a row.

    Args:
        held: of each, whether it holds.
        refused: how many asked for what the process with the tests refuses; they count as not held.
        why: text on the first of these.
    """

    held: Sequence[bool]
    refused: int = 0
    why: str = ""


def run_assertions(sandbox: Sandbox, source: str, setup: str, assertions: Sequence[str]) -> Verdict:
    """Run assertions one after another, after the program and the setup have run."""
    key = secrets.token_bytes(_KEY_BYTES)
    names = names_used([setup, *assertions])
    given = json.dumps({"setup": setup, "tests": list(assertions), "names": names, "key": key.hex()})
    if isinstance(sandbox, BubblewrapSandbox):
        run = sandbox.run_beside(_tests(None), given, _program(source))
    else:
        run = sandbox.run(_tests(_program(source)), given)
    return _read(run, len(assertions), key)


def _read(run: ProgramRun, count: int, key: bytes) -> Verdict:
    """Read what the process with the tests has printed, a signed line for each test.

    A test that it did not get to does not hold; none does where the program has used more than it may.
    """
    lines = [line.rpartition(" ") for line in run.stdout.splitlines()] if run.ended in _READ_TO else []
    found = [json.loads(text) for text, _, digest in lines if digest == _digest(text, key)]
    held = {number for number, holds, _ in found if holds}
    refusals = [why for _, _, why in found if why]
    return Verdict(held=[each in held for each in range(count)], refused=len(refusals), why="".join(refusals[:1]))


def _digest(text: str, key: bytes) -> str:
    return hashlib.blake2b(text.encode(), key=key).hexdigest()


def _program(source: str) -> str:
    """Give the code that runs a program and answers for it; DESCRIPTOR is the socket's, where it is known before."""
    return f"{_loading('inside_link', 'inside_program')}\n{_DESCRIPTOR}\nmodule.main(DESCRIPTOR, {source!r})\n"


def _tests(program: str | None) -> str:
    """Give the code that runs tests; of a program in another sandbox, or of one that it is to start."""
    descriptor = "int(os.environ[VARIABLE])".replace("VARIABLE", repr(SOCKET_VARIABLE)) if program is None else "None"
    return f"{_loading('inside_link', 'inside_tests')}\nmodule.main({descriptor}, {program or ''!r})\n"


_DESCRIPTOR: Final = f"DESCRIPTOR = globals().get('DESCRIPTOR') or int(os.environ[{SOCKET_VARIABLE!r}])"


@cache
def _loading(*names: str) -> str:
    """Give the code that loads files of that package without the package; `module` is the last of them."""
    texts = [(_PACKAGE + name, (_FOLDER / f"{name}.py").read_text()) for name in names]
    return (
        f"import os, sys, types\nfor name, text in {texts!r}:\n"
        "    module = sys.modules[name] = types.ModuleType(name)\n"
        "    exec(compile(text, name, 'exec'), vars(module))"
    )
