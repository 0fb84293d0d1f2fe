"""Writes the table of docs/reliability.md: each fault done to a run that trains, for real, and what comes of it.

    python tools/reliability.py                    all faults, printed
    python tools/reliability.py --only killed      those whose name holds the word
    python tools/reliability.py --write            put the table into docs/reliability.md

Each is a run of `grpo-async-app train` on a model made on the spot, with two rollout engines and a heartbeat deadline
of 10 s. It takes about twenty minutes on two cores.
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fake_hosts import FakeHosts, fake_hosts
from role_faults import Job, final_reward, last_value, updates
from run_faults import FAULTS, Fault, Scene, kill_driver, leave_alone
from workspace import ROOT

from offbeat_testing import RunningCommand

DOCUMENT: Final = ROOT / "docs" / "reliability.md"
MARK: Final = "<!-- written by tools/reliability.py -->"
END: Final = "<!-- end -->"
NUM_EPOCHS: Final = 10
BEGUN_AFTER: Final = 5
PATIENCE_S: Final = 240.0
ON_RAY: Final = ("--cluster.launcher=ray", "--cluster.connect_timeout_s=300")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a fault.

    Args:
        noticed_s: from the fault to the line that tells of it; None when nothing is said.
        again_s: from the fault to the first update after it was noticed.
        reissued: prompt groups that were issued again.
        repeated: updates that were trained again, from the last checkpoint.
        reward: mean of the last ten updates.
        complaints: about the accounting.
    """

    noticed_s: float | None
    again_s: float
    reissued: int
    repeated: int
    reward: float
    complaints: tuple[str, ...]


@contextmanager
def _folder(fault: Fault) -> Iterator[Path]:
    """A place for the run, on a small file system of its own where the fault asks for one."""
    folder = Path(tempfile.mkdtemp(prefix="reliability-"))
    try:
        if fault.needs_root:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", folder], check=True)
        yield folder
    finally:
        if fault.needs_root:
            subprocess.run(["umount", folder], check=True)
        shutil.rmtree(folder)


@contextmanager
def _hosts(fault: Fault) -> Iterator[FakeHosts | None]:
    """Hosts for a fault that happens to one."""
    if not fault.num_hosts:
        yield None
        return
    with fake_hosts([1] * fault.num_hosts) as hosts:
        yield hosts


def try_fault(fault: Fault) -> Outcome:
    """Do it to a run, and see the run to its end."""
    with _folder(fault) as folder, _hosts(fault) as hosts, ExitStack() as undo:
        job = Job.make(folder, NUM_EPOCHS)
        words = [] if hosts is None else [*ON_RAY, f"--cluster.address={hosts.address}"]
        with job.train(*fault.words, *words) as process:
            process.wait_until(lambda: len(updates(job.run)) >= BEGUN_AFTER, "the run has begun", PATIENCE_S)
            time.sleep(random.uniform(0, 0.3))
            before, at_s = updates(job.run)[-1], time.monotonic()
            fault.inject(Scene(job, process, undo, hosts))
            if fault.undo_after_s is not None:
                time.sleep(fault.undo_after_s)
                undo.close()
            noticed_s = _wait_noticed(process, fault, at_s)
            if not fault.ends_with:
                repeated, again_s = _wait_again(job, process, before, at_s)
                _require_end(process, 0)
            else:
                _require_end(process, fault.ends_with)
                undo.close()
        if fault.ends_with:
            with job.resume() as process:
                repeated, again_s = _wait_again(job, process, before, at_s)
                _require_end(process, 0)
        return Outcome(
            noticed_s=noticed_s,
            again_s=again_s,
            reissued=int(last_value(job.run, "groups/reissued")),
            repeated=repeated,
            reward=final_reward(job.run),
            complaints=tuple(job.complaints()),
        )


def _wait_noticed(process: RunningCommand, fault: Fault, at_s: float) -> float | None:
    if not fault.noticed_by:
        return time.monotonic() - at_s if fault.inject is kill_driver else None
    process.wait_until(lambda: fault.noticed_by in process.output, f"it says {fault.noticed_by!r}", PATIENCE_S)
    return time.monotonic() - at_s


def _wait_again(job: Job, process: RunningCommand, before: int, at_s: float) -> tuple[int, float]:
    """How many updates were done again, and when the first update came after the fault was noticed."""
    least = seen = updates(job.run)[-1]

    def came() -> bool:
        nonlocal least, seen
        steps = updates(job.run)
        last = steps[-1] if steps else 0
        least, moved, seen = min(least, last), last > seen, last
        return moved

    process.wait_until(came, "an update", PATIENCE_S)
    return max(0, before - least), time.monotonic() - at_s


def _require_end(process: RunningCommand, code: int) -> None:
    ended = process.wait(PATIENCE_S)
    if ended != code:
        raise SystemExit(f"ended with {ended} instead of {code}:\n{process.output}")


def table(rows: dict[str, list[str]]) -> str:
    """The table in Markdown, in the order of `FAULTS`.

    Args:
        rows: cells by the fault's name.
    """
    head = ["fault", "what happens", "noticed", "trains again", "lost", "reward at the end", "accounting at the end"]
    held = [rows[fault.name] for fault in FAULTS if fault.name in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *held])


def read_table(page: str) -> dict[str, list[str]]:
    """The rows that a page holds, by the fault's name."""
    _, _, after = page.partition(MARK)
    lines = [line for line in after.partition(END)[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0]: row for row in cells}


def put_text(mark: str, text: str) -> None:
    """Put a text into docs/reliability.md, between a mark of its own and the end.

    Args:
        mark: a comment that the page holds once.
        text: in Markdown.
    """
    page = DOCUMENT.read_text()
    found = re.search(f"{re.escape(mark)}.*?{END}", page, flags=re.DOTALL)
    if found is None:
        raise SystemExit(f"{DOCUMENT} holds no {mark!r} with {END!r} after it")
    DOCUMENT.write_text(page[: found.start()] + f"{mark}\n{text}\n{END}" + page[found.end() :])


def _row(fault: Fault, outcome: Outcome) -> list[str]:
    noticed = f"{outcome.noticed_s:.1f} s" if outcome.noticed_s is not None else "nothing is said"
    lost = [
        f"{count} {what}"
        for count, what in (
            (outcome.reissued, "prompts in flight, issued again"),
            (outcome.repeated, "updates, trained again"),
        )
        if count
    ]
    exact = "; ".join(outcome.complaints) or f"every prompt {NUM_EPOCHS} times in {NUM_EPOCHS} epochs"
    again = f"{outcome.again_s:.1f} s"
    if fault.inject is leave_alone:
        noticed = again = "-"
    return [fault.name, fault.happens, noticed, again, ", ".join(lost) or "nothing", f"{outcome.reward:.2f}", exact]


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name holds this")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reliability.md")
    asked = parser.parse_args()
    failed = False
    for fault in FAULTS:
        if asked.only not in fault.name:
            continue
        if (fault.needs_root or fault.num_hosts) and os.geteuid():
            print(f"{fault.name}: left out, it needs root")
            continue
        outcome = try_fault(fault)
        row, failed = _row(fault, outcome), failed or bool(outcome.complaints)
        print(" | ".join(row), flush=True)
        if asked.write:  # at once: the other rows stay as they are
            put_text(MARK, table({**read_table(DOCUMENT.read_text()), fault.name: row}))
    if failed:
        raise SystemExit("something was trained twice, or never: see above")


if __name__ == "__main__":
    main()
