"""Commands run several at a time; the output of each is shown in one piece when it has ended."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final

LOOK_EVERY_S: Final = 0.2
END_WITHIN_S: Final = 20.0
"""For a command to end after it was asked to."""
LAST_LINES: Final = 60
"""Lines of a failed command that are shown again at the end, where a reader looks first."""


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    began_s: float


def run_side_by_side(
    commands: Mapping[str, Sequence[str]], at_once: int, environment: Mapping[str, str] | None = None
) -> list[str]:
    """Run commands in this order, `at_once` of them at a time; return the names of those that failed.

    When this is interrupted, those that run are asked to end, and killed if they do not within seconds.
    """
    waiting, running, failed = list(commands), dict[str, _Running](), dict[str, list[str]]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                running[name] = _start(commands[name], environment)
            time.sleep(LOOK_EVERY_S)
            for name in [name for name, each in running.items() if each.process.poll() is not None]:
                each = running.pop(name)
                lines = _show(name, each)
                if each.process.returncode:
                    failed[name] = lines[-LAST_LINES:]
    finally:
        for each in running.values():
            each.process.terminate()
        for name, each in running.items():
            try:
                each.process.wait(END_WITHIN_S)
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()
            _show(name, each)
    for name, lines in failed.items():
        print(f"== {name} failed; its last lines:", *lines, sep="\n", flush=True)
    return list(failed)


def _start(command: Sequence[str], environment: Mapping[str, str] | None) -> _Running:
    output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_show`
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
    )
    return _Running(process, output, time.monotonic())


def _show(name: str, each: _Running) -> list[str]:
    """Show what a command has printed, and return its lines."""
    how = f"failed ({each.process.returncode})" if each.process.returncode else "passed"
    with each.output as output:
        output.seek(0)
        text = output.read().decode(errors="replace")
    sys.stdout.write(text)
    print(f"== {name} {how} after {time.monotonic() - each.began_s:.0f} s", flush=True)
    return text.splitlines()
