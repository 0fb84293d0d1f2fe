"""Stand-ins, in a scorer's process, for functions of the program that has started the run."""

import asyncio
import inspect
import json
import os
import socket
from collections.abc import Callable
from contextlib import closing
from typing import Any, Final

from offbeat._calls import MAX_LINE_BYTES, SOCKET_VARIABLE, Call
from offbeat_core import ConfigError
from offbeat_data import FunctionFailure, RewardError

_DESCRIBE_WITHIN_S: Final = 60.0
"""Longest wait for the signature of a function: the program may be busy, as with a long call into C."""


def stand_in(name: str) -> Callable[..., Any]:
    """Return a function that has the signature of the program's, sends its arguments there, and returns the result.

    It raises `FunctionFailure` for what the program's function raises, with the traceback there as a note.

    Raises:
        AttributeError: it is no name of a function.
        ConfigError: the program does not answer, or gives no function of this name as reward.
    """
    if name.startswith("__"):  # such as __path__, which the import system looks for
        raise AttributeError(name)
    try:
        described = _ask(json.dumps({"describe": name}).encode() + b"\n", _DESCRIBE_WITHIN_S)
    except RewardError as error:
        raise ConfigError(f"reward offbeat.caller:{name}: {error}") from error
    if "known" in described:
        known = ", ".join(described["known"])
        raise ConfigError(f"reward offbeat.caller:{name}: the program gives {known} as reward: name it so there")

    def call(*args: Any, **named: Any) -> Any:
        # No deadline: the scorer is ended after reward.timeout_s.
        return _result(_ask(Call(function=name, args=args, named=named).encode(), None))

    async def call_and_wait(*args: Any, **named: Any) -> Any:
        return _result(await _ask_and_wait(Call(function=name, args=args, named=named).encode()))

    found: Callable[..., Any] = call_and_wait if described["waits"] else call
    found.__name__ = name
    if (parameters := described["parameters"]) is not None:
        found.__signature__ = inspect.Signature([_parameter(*each) for each in parameters])  # type: ignore[attr-defined]
    return found


def _parameter(name: str, kind: str, has_default: bool) -> inspect.Parameter:
    default = None if has_default else inspect.Parameter.empty
    return inspect.Parameter(name, getattr(inspect.Parameter, kind), default=default)


def _ask(line: bytes, within_s: float | None) -> Any:
    try:
        with closing(socket.socket(socket.AF_UNIX)) as connection:
            connection.settimeout(within_s)
            connection.connect(_path())
            connection.sendall(line)
            with connection.makefile("rb") as answers:
                return _read(answers.readline(MAX_LINE_BYTES + 1))
    except OSError as error:
        raise _gone() from error


async def _ask_and_wait(line: bytes) -> Any:
    try:
        reader, writer = await asyncio.open_unix_connection(_path(), limit=MAX_LINE_BYTES)
        with closing(writer):
            writer.write(line)
            await writer.drain()
            return _read(await reader.readline())
    except OSError as error:
        raise _gone() from error


def _path() -> str:
    if path := os.environ.get(SOCKET_VARIABLE):
        return path
    raise _gone()


def _gone() -> RewardError:
    return RewardError(
        "the function belongs to the program that has started the run, and that program does not answer: continue the "
        "run from a program that has the function, by offbeat.resume(RUN, reward=FUNCTION)"
    )


def _read(line: bytes) -> Any:
    if not line.endswith(b"\n"):
        raise _gone()
    return json.loads(line)


def _result(answer: Any) -> Any:
    if "failure" not in answer:
        return answer["result"]
    said = answer["failure"]
    failure = FunctionFailure(said["kind"], said["text"], said["is_fault"])
    failure.add_note(said["trace"])
    raise failure
