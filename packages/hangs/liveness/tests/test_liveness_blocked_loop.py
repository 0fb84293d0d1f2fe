"""A driver whose event loop does not turn is reported as such, with the line: real processes, without torch."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from offbeat_liveness._cli import main
from offbeat_liveness._diagnosis import find_verdict
from offbeat_liveness._diagnosis.graph import WaitGraph
from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._dumps import DumpWriter
from offbeat_liveness._process.progress import ProgressTracker
from offbeat_liveness._process.snapshot import ProcessSnapshot, Wait

PROGRAM = """
import asyncio, sys, time
import offbeat_liveness as liveness

STALL_S, HELD_S = 1.0, 6.0


def count():
    end_s = time.monotonic() + HELD_S
    while time.monotonic() < end_s:
        sum(range(100))


async def computes():
    count()


async def computes_in_steps():
    end_s = time.monotonic() + HELD_S
    while time.monotonic() < end_s:
        sum(range(100))
        await asyncio.sleep(0)


async def sleeps():
    time.sleep(HELD_S)


async def main(what):
    async def wait():
        with liveness.waiting("trainer-0.update", on="trainer-0", deadline_s=7200):
            await asyncio.sleep(3600)

    waits = asyncio.create_task(wait())
    await asyncio.sleep(0.1)
    await what()
    waits.cancel()
    await asyncio.sleep(2.0)


def show(verdict):
    print(verdict.text, flush=True)


liveness.watch(STALL_S, policy=sys.argv[2], name="driver", on_verdict=show)
asyncio.run(main(globals()[sys.argv[1]]))
"""


def output_of(what: str, tmp_path: Path, policy: str = "report") -> str:
    script = tmp_path / "driver.py"
    script.write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, script, what, policy], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("policy", ["report", "strict"])
def test_a_callback_that_computes_for_long_is_named_with_its_line_and_ends_no_run(policy: str, tmp_path: Path) -> None:
    output = output_of("computes", tmp_path, policy)
    assert "suspicion: blocked-loop: driver has been in one callback of its event loop for" in output
    [headline] = [line for line in output.splitlines() if "blocked-loop" in line]
    assert "driver.py:" in headline
    assert "in count" in headline
    assert "not acted upon: a process that computes is never ended" in output


@pytest.mark.parametrize("what", ["computes_in_steps", "sleeps"])
def test_a_loop_that_turns_or_waits_for_something_known_is_not_blocked(what: str, tmp_path: Path) -> None:
    assert "blocked-loop" not in output_of(what, tmp_path)


def test_callbacks_that_follow_each_other_hold_up_nothing_though_each_look_meets_one() -> None:
    tracker = ProgressTracker(60.0)
    held_up_s: list[float] = []

    def look() -> None:
        looking = threading.Thread(target=tracker.look)
        looking.start()
        looking.join()
        held_up_s.append(tracker.held_up_s())

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for callback in (look, look, lambda: [look(), look()]):
            loop.call_soon(callback)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert held_up_s[:3] == [0.0, 0.0, 0.0]
    assert held_up_s[3] > 0


def driver(*, held_up_s: float, thread: str = "MainThread") -> ProcessSnapshot:
    wait = Wait(kind="declared", what="trainer-0.update", on="trainer-0", age_s=70.0, thread=thread)
    return ProcessSnapshot(key="vm:1", name="driver", pid=1, waits=(wait,), held_up_s=held_up_s)


def decide(*heads: ProcessSnapshot) -> Verdict | None:
    return find_verdict(WaitGraph(heads=heads, stall_after_s=60.0))


def test_a_producer_is_not_blamed_while_its_answer_could_not_be_received() -> None:
    free, just_held_up, held_up = (decide(driver(held_up_s=each)) for each in (0.0, 5.0, 65.0))
    assert free is not None
    assert free.kind == "starved"
    assert just_held_up is None
    assert held_up is not None
    assert held_up.kind == "blocked-loop"


def test_a_wait_beside_the_loop_gets_answers_whatever_the_loop_does() -> None:
    verdict = decide(driver(held_up_s=65.0, thread="poll"))
    assert verdict is not None
    assert verdict.kind == "starved"


def test_dumps_of_a_run_that_reported_nothing_are_shown_with_the_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = DumpWriter(tmp_path)
    writer.write_head(driver(held_up_s=65.0))
    assert writer.flush(20.0)
    assert main(["show", str(tmp_path)]) == 0
    assert "blocked-loop: driver has been in one callback of its event loop for 65 s" in capsys.readouterr().out
