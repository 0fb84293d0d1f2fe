"""Writes the table of docs/reliability.md: each fault done to a run that trains, for real, and what comes of it.

    python tools/reliability.py                    all faults, printed
    python tools/reliability.py --only killed      those whose name holds the word
    python tools/reliability.py --write            put the table into docs/reliability.md

Each is a run of `grpo-async-app train` on a model made on the spot, with two rollout engines and a heartbeat deadline
of 10 s. It takes about ten minutes on two cores.
"""

import argparse
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from role_faults import Job, final_reward, last_value, role_pids, signal_role, updates
from workspace import ROOT

from offbeat_testing import RunningCommand, wait_until_gone

DOCUMENT: Final = ROOT / "docs" / "reliability.md"
MARK: Final = "<!-- written by tools/reliability.py -->"
END: Final = "<!-- end -->"
NUM_EPOCHS: Final = 10
BEGUN_AFTER: Final = 5
PATIENCE_S: Final = 240.0
AGAIN: Final = "is started again"
LONGER: Final = ("--rollout.max_tokens=64", "--rollout.max_model_len=128", "--rollout.samples_per_prompt=8")


@dataclass
class Scene:
    """A run that trains, in the middle of which something happens.

    Args:
        job: what it trains.
        process: its driver.
        undo: what ends the fault.
    """

    job: Job
    process: RunningCommand
    undo: ExitStack


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that happens to a run.

    Args:
        name: in words.
        inject: does it.
        happens: what the run does about it, in words.
        noticed_by: what the run then says; empty when it says nothing.
        words: more of the command line.
        undo_after_s: the fault ends by itself; None: it lasts until the run is over.
        ends_with: exit code of the run; a run that fails is resumed.
        needs_root: it mounts a file system.
    """

    name: str
    inject: Callable[[Scene], None]
    happens: str
    noticed_by: str = AGAIN
    words: tuple[str, ...] = ()
    undo_after_s: float | None = None
    ends_with: int = 0
    needs_root: bool = False


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


def kill(role: str, number: signal.Signals = signal.SIGKILL) -> Callable[[Scene], None]:
    """Send a signal to a role."""

    def inject(scene: Scene) -> None:
        pid = signal_role(scene.process, role, number)
        if number == signal.SIGSTOP:
            scene.undo.callback(_wake, pid)

    return inject


def limit(role: str, what: int, amount: int) -> Callable[[Scene], None]:
    """Lower a limit of a role's process; undone at the end."""

    def inject(scene: Scene) -> None:
        pid = role_pids(scene.process)[role]
        before = resource.prlimit(pid, what, (amount, resource.RLIM_INFINITY))
        scene.undo.callback(_restore_limit, pid, what, before)

    return inject


def leave_alone(scene: Scene) -> None:
    """Do nothing."""


def slow_down(scene: Scene) -> None:
    """Let rollout-1 run a tenth of the time."""
    scene.undo.enter_context(slowed(role_pids(scene.process)["rollout-1"], 0.1))


def fill_disk(scene: Scene) -> None:
    """Take all room of the file system the run lies on."""
    path = scene.job.folder / "filler"
    with suppress(OSError), path.open("wb") as file:
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    scene.undo.callback(path.unlink)


def kill_driver(scene: Scene) -> None:
    """`kill -9` of the driver, and nobody tells the others."""
    roles = role_pids(scene.process).values()
    scene.process.kill()
    scene.process.wait()
    wait_until_gone(roles, 30)


FAULTS: Final = (
    Fault(name="none, to compare with", inject=leave_alone, happens="trains to its end", noticed_by=""),
    Fault(
        name="none, answers of 64 tokens",
        inject=leave_alone,
        happens="trains to its end; what the next rows compare with",
        noticed_by="",
        words=LONGER,
    ),
    Fault(
        name="rollout engine killed",
        words=LONGER,
        inject=kill("rollout-1"),
        happens="started again, given the trainer's weights; its prompts are issued again to whoever serves",
    ),
    Fault(
        name="rollout engine stopped (SIGSTOP)",
        words=LONGER,
        inject=kill("rollout-1", signal.SIGSTOP),
        happens="does not answer `health` for `cluster.silent_after_s` (10 s): killed, then as above",
    ),
    Fault(
        name="rollout engine out of memory (RLIMIT_AS)",
        words=LONGER,
        inject=limit("rollout-1", resource.RLIMIT_AS, 1 << 20),
        happens="whatever call fails first: the process is replaced, then as above",
    ),
    Fault(
        name="rollout engine slow by 10 times",
        inject=slow_down,
        happens="named as a straggler, never ended; least-loaded routing gives it less",
        noticed_by="is a straggler",
        words=LONGER,
    ),
    Fault(
        name="trainer killed",
        inject=kill("trainer-0"),
        happens="all its ranks are started again from the last checkpoint; engines stay up",
    ),
    Fault(
        name="one of two trainer ranks killed",
        inject=kill("trainer-1"),
        happens="the other is ended too; then as above",
        words=("--engine.num_ranks=2",),
    ),
    Fault(
        name="trainer stopped (SIGSTOP)",
        inject=kill("trainer-0", signal.SIGSTOP),
        happens="does not answer for `cluster.silent_after_s` (10 s): killed, then as above",
    ),
    Fault(
        name="trainer rests 5 s: sample buffer full",
        inject=kill("trainer-0", signal.SIGSTOP),
        happens="no prompt is started beyond the staleness bound; goes on by itself",
        noticed_by="",
        undo_after_s=5.0,
    ),
    Fault(
        name="scorer killed",
        inject=kill("scorer"),
        happens="started again, and asked again for the completion it died over",
        noticed_by="",
    ),
    Fault(
        name="driver killed",
        inject=kill_driver,
        happens="every role dies with it; `resume` goes on from the last checkpoint",
        noticed_by="",
        ends_with=-signal.SIGKILL,
    ),
    Fault(
        name="checkpoint cannot be written (RLIMIT_FSIZE)",
        inject=limit("trainer-0", resource.RLIMIT_FSIZE, 10_000),
        happens="the run ends with an error that says so (exit code 2); older checkpoints stay whole; `resume` goes on",
        noticed_by="no space left",
        ends_with=2,
    ),
    Fault(
        name="disk full (tmpfs)",
        inject=fill_disk,
        happens="ends with an error that says so (exit code 2), also where a log cannot be written; `resume` goes on",
        noticed_by="no space left",
        ends_with=2,
        needs_root=True,
    ),
)


@contextmanager
def slowed(pid: int, share: float, period_s: float = 0.2) -> Iterator[None]:
    """Let a process run only so much of the time."""
    ended = threading.Event()

    def work() -> None:
        with suppress(ProcessLookupError):
            while not ended.wait(period_s * share):
                os.kill(pid, signal.SIGSTOP)
                ended.wait(period_s * (1 - share))
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _wake(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _restore_limit(pid: int, what: int, before: tuple[int, int]) -> None:
    with suppress(ProcessLookupError):
        resource.prlimit(pid, what, before)


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


def try_fault(fault: Fault) -> Outcome:
    """Do it to a run, and see the run to its end."""
    with _folder(fault) as folder, ExitStack() as undo:
        job = Job.make(folder, NUM_EPOCHS)
        with job.train(*fault.words) as process:
            process.wait_until(lambda: len(updates(job.run)) >= BEGUN_AFTER, "the run has begun", PATIENCE_S)
            time.sleep(random.uniform(0, 0.3))
            before, at_s = updates(job.run)[-1], time.monotonic()
            fault.inject(Scene(job, process, undo))
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
        if fault.needs_root and os.geteuid():
            print(f"{fault.name}: left out, it mounts a file system and needs root")
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
