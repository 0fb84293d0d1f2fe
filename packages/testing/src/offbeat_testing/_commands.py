"""The command line of an application, called in this process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import pytest


@dataclass(frozen=True)
class CommandEnded:
    """How a command ended.

    Args:
        code: exit code.
        out: standard output.
        err: standard error.
    """

    code: int
    out: str
    err: str


class CommandLine:
    """Calls the command line of an application with words: `command("train", "my.toml")`.

    Args:
        program: its name.
        main: reads `sys.argv`, and leaves by SystemExit.
        monkeypatch: the test's.
        capsys: the test's.
    """

    def __init__(
        self,
        program: str,
        main: Callable[[], NoReturn],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        self._program, self._main, self._monkeypatch, self._capsys = program, main, monkeypatch, capsys

    def __call__(self, *words: object) -> CommandEnded:
        """Run one command to its end."""
        self._monkeypatch.setattr("sys.argv", [self._program, *map(str, words)])
        with pytest.raises(SystemExit) as left:
            self._main()
        captured = self._capsys.readouterr()
        return CommandEnded(int(left.value.code or 0), captured.out, captured.err)
