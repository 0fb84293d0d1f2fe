"""Runs hanglint over every Python file of an environment, package by package, and says time, memory and what broke.

python tools/hanglint_sweep.py                      the environment of this Python
python tools/hanglint_sweep.py FOLDER --top 20      any folder; the 20 that took longest

Each folder of `site-packages` is a run of the command in a process of its own, on one core, without the cache. The exit
code is 1 when one of them did anything but end with findings or without.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DEADLINE_S: Final = 1_800
MIB: Final = 1 << 20


@dataclass(frozen=True)
class Swept:
    """One run.

    Args:
        name: of the package.
        seconds: of wall-clock time, the process's start included.
        cpu_s: of processor time.
        peak_bytes: the most memory that it held.
        failure: what it did instead of ending well; empty when it did that.
    """

    name: str
    num_files: int
    num_lines: int
    num_findings: int
    num_unreadable: int
    seconds: float
    cpu_s: float
    peak_bytes: int
    failure: str = ""


def targets(folder: Path) -> Iterator[Path]:
    """Return what is run by itself: folders with Python files, and files beside them."""
    for path in sorted(folder.iterdir()):
        if (
            path.is_dir() and path.name != "__pycache__" and next(path.rglob("*.py"), None) is not None
        ) or path.suffix == ".py":
            yield path


def sweep_one(path: Path, deadline_s: float = DEADLINE_S) -> Swept:
    """Run hanglint over one of them."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.json"
        options = ("--confidence", "low", "--no-cache", "--jobs", "1", "--format", "json", "--output", str(report))
        command = [sys.executable, "-m", "offbeat_hanglint", str(path), *options]
        start_s = time.monotonic()
        with (Path(name) / "stderr").open("w+b") as stderr:
            running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, cwd=name)
            status, usage = _wait(running, start_s + deadline_s)
            seconds = time.monotonic() - start_s
            stderr.seek(0)
            said = stderr.read().decode(errors="replace")
        code = os.waitstatus_to_exitcode(status)
        data = json.loads(report.read_text()) if report.is_file() else {}
    failure = "" if code in (0, 1) and data and "Traceback" not in said else f"exit code {code}: {said[-2_000:]}"
    counts = data.get("statistics", {"files": 0, "lines": 0})
    return Swept(
        name=path.name,
        num_files=counts["files"],
        num_lines=counts["lines"],
        num_findings=len(data.get("findings", [])),
        num_unreadable=len(data.get("unreadable", [])),
        seconds=seconds,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * 1024,
        failure=failure,
    )


def _wait(running: "subprocess.Popen[bytes]", end_s: float) -> "tuple[int, os.struct_rusage]":  # type: ignore[name-defined]
    """Return the process's status and usage; killed at the deadline."""
    while True:
        pid, status, usage = os.wait4(running.pid, os.WNOHANG)
        if pid:
            running.returncode = os.waitstatus_to_exitcode(status)
            return status, usage
        if time.monotonic() > end_s:
            running.kill()
        time.sleep(0.02)


def table(swept: Sequence[Swept], top: int) -> str:
    """Return the runs that took longest, and the sum of all."""
    rows = [f"{'package':32}{'files':>8}{'lines':>11}{'s':>8}{'CPU s':>8}{'MiB':>7}{'found':>7}{'unread':>7}"]
    total = Swept(
        name=f"all {len(swept)}",
        num_files=sum(each.num_files for each in swept),
        num_lines=sum(each.num_lines for each in swept),
        num_findings=sum(each.num_findings for each in swept),
        num_unreadable=sum(each.num_unreadable for each in swept),
        seconds=sum(each.seconds for each in swept),
        cpu_s=sum(each.cpu_s for each in swept),
        peak_bytes=max((each.peak_bytes for each in swept), default=0),
    )
    for each in [*sorted(swept, key=lambda one: -one.cpu_s)[:top], total]:
        counts = (
            f"{each.num_files:8,}{each.num_lines:11,}{each.seconds:8.1f}{each.cpu_s:8.1f}{each.peak_bytes / MIB:7.0f}"
        )
        rows.append(f"{each.name:32}{counts}{each.num_findings:7,}{each.num_unreadable:7,}")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(sysconfig.get_path("purelib")))
    parser.add_argument("--top", type=int, default=12, help="rows of the table")
    options = parser.parse_args(arguments)
    swept = [sweep_one(path) for path in targets(options.folder)]
    print(table(swept, options.top))
    failed = [each for each in swept if each.failure]
    for each in failed:
        print(f"{each.name}: {each.failure}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
