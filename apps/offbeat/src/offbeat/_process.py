"""A command of an application in a process of its own, and the error that it leaves."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from offbeat._call_server import CallServer
from offbeat_core import MADE_FILE_VARIABLE, OffbeatError
from offbeat_run import ERROR_FILE_VARIABLE, load_error

INTERRUPTED: Final = 130
"""Exit code of a command that was asked to end."""
_COLUMNS: Final = 120
"""Width of its tables, unless the environment has another: it writes to no terminal."""


class CommandProcess:
    """A command of an application, in a session of its own: Ctrl-C in a terminal reaches it by `interrupt` alone.

    Args:
        application: name of the application.
        words: of the command line; "FILE" among them stands for a file with `text`.
        text: configuration of the run; None: no word stands for it.
        functions: reward functions of the caller, by name.
        stderr: where its standard error goes: to its output, or to a file descriptor.

    Attributes:
        process: its standard output is a pipe.
    """

    def __init__(
        self,
        application: str,
        words: Sequence[object],
        *,
        text: str | None = None,
        functions: Mapping[str, Callable[..., Any]],
        stderr: int = subprocess.STDOUT,
    ) -> None:
        self._command = f"{application} {words[0]}"
        self._folder = tempfile.TemporaryDirectory(prefix="offbeat-")  # its mode is 0700
        self._error = Path(self._folder.name) / "error.json"
        file = Path(self._folder.name) / f"{application.partition('-')[0]}.toml"
        if text is not None:
            file.write_text(text, encoding="utf-8")
        given = [str(file if word == "FILE" else word) for word in words]
        self._server = CallServer(functions) if functions else None
        called = self._server.environment if self._server else {}
        # A kernel of Jupyter asks its children for colours, and nothing here reads them.
        plain = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "CLICOLOR_FORCE")}
        plain = {"COLUMNS": str(_COLUMNS), **plain, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", application.replace("-", "_"), *given],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**plain, **called, ERROR_FILE_VARIABLE: str(self._error), MADE_FILE_VARIABLE: str(file)},
                start_new_session=True,
            )
        except BaseException:
            self.close()
            raise

    def interrupt(self) -> None:
        """Ask it to end, as Ctrl-C does; a second time it ends at once."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it and the processes of its session at once."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def error(self) -> OffbeatError | None:
        """Return the error that has ended it; None where it has not ended, has succeeded, or was asked to end."""
        code = self.process.poll()
        if code in (None, 0, INTERRUPTED):
            return None
        if left := load_error(self._error):
            return left
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return OffbeatError(f"{self._command} {how}, and left no error; its output says more")

    def close(self) -> None:
        """Take no more calls, and remove its files; a second call does nothing."""
        if self._server:
            self._server.close()
            self._server = None
        self._folder.cleanup()


def output_of(
    application: str,
    words: Sequence[object],
    *,
    text: str | None = None,
    functions: Mapping[str, Callable[..., Any]] = {},
) -> str:
    """Run a command to its end, and return what it has printed to standard output.

    Raises:
        OffbeatError: that of the command, of its own class.
        KeyboardInterrupt: the caller was interrupted, and the command with it.
    """
    command = CommandProcess(application, words, text=text, functions=functions, stderr=subprocess.PIPE)
    try:
        with command.process:
            try:
                output, _ = command.process.communicate()  # the command's own waits have deadlines
            except BaseException:
                command.interrupt()
                raise
        if error := command.error():
            raise error
        return output.decode(errors="replace")
    finally:
        command.close()
