"""Calls of a caller's functions as they travel: for each a connection, with a line of JSON there and one back."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from offbeat_data import FunctionFailure, Prompt

SOCKET_VARIABLE: Final = "OFFBEAT_CALLER"
"""Variable of a run's environment: path of the Unix socket of the program that has started it."""
MAX_LINE_BYTES: Final = 1 << 28
"""Longest line: a prompt and its completions with their token ids, 1024 of 32,768 tokens at 8 bytes each."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a function by its name.

    Args:
        function: name under which the server has it.
        args: by position; the first may be a `Prompt`, the others are JSON.
        named: by name, JSON or functions, in whose places the called function gets some that do nothing.
    """

    function: str
    args: Sequence[Any]
    named: Mapping[str, Any]

    def encode(self) -> bytes:
        """Return the line."""
        prompt = self.args[0].to_json() if self.args and isinstance(self.args[0], Prompt) else None
        plain = {name: value for name, value in self.named.items() if not callable(value)}
        line = {
            "function": self.function,
            "prompt": prompt,
            "args": list(self.args if prompt is None else self.args[1:]),
            "named": plain,
            "silent": [name for name in self.named if name not in plain],
        }
        return json.dumps(line).encode() + b"\n"

    @classmethod
    def decode(cls, line: Mapping[str, Any]) -> "Call":
        """Return the call that `encode` has written."""
        prompts = [] if line["prompt"] is None else [Prompt.from_json(line["prompt"])]
        silent = dict.fromkeys(line["silent"], _do_nothing)
        return cls(function=line["function"], args=[*prompts, *line["args"]], named={**line["named"], **silent})


def _do_nothing(*_: Any, **__: Any) -> None:
    return None


def encode_result(result: Any) -> bytes:
    """Return the line of a result; arrays and numbers of numpy and torch become lists and numbers.

    Raises:
        TypeError: it holds what JSON has no form for.
    """
    return json.dumps({"result": result}, default=plain, skipkeys=True).encode() + b"\n"


def encode_failure(failure: FunctionFailure, trace: str) -> bytes:
    """Return the line of an exception, with the text of its traceback."""
    said = {"kind": failure.kind, "text": failure.text, "is_fault": failure.is_fault, "trace": trace}
    return json.dumps({"failure": said}).encode() + b"\n"


def plain(value: Any) -> Any:
    """Return arrays and numbers of numpy, torch and pandas as those of Python: the `default` of `json.dumps`.

    Raises:
        TypeError: it is something else.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__float__"):
        return float(value)
    raise TypeError(f"{value!r:.80} ({type(value).__name__}) cannot be written as JSON")
