"""What is done about a stall under `abort`: healthy runs continue whatever they wait for, proofs end a run, gently."""

import ctypes
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from liveness_launch import ABORTED, STALL_S, Body, Programs, launch, step

import offbeat_liveness as liveness
from offbeat_liveness import _announcer, _monitor
from offbeat_liveness._announcer import Announcer
from offbeat_liveness._diagnosis import Ending
from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._dumps import DumpWriter
from offbeat_liveness._monitor import must_end
from offbeat_liveness._network.peers import Peers
from offbeat_liveness._process.snapshot import ProcessSnapshot, Wait
from offbeat_liveness._settings import Settings

PAUSE_S = 4 * STALL_S


def evaluates_in_a_subprocess(rank: int) -> None:
    if rank == 0:
        subprocess.run(["sleep", str(PAUSE_S)], check=True)
    dist.barrier()


def sleeps(rank: int) -> None:
    if rank == 0:
        time.sleep(PAUSE_S)
    dist.barrier()


def declares_a_wait(rank: int) -> None:
    if rank == 0:
        with liveness.waiting("upload", deadline_s=600):
            threading.Event().wait(PAUSE_S)
    dist.barrier()


def declares_a_wait_for_an_unwatched_process(rank: int) -> None:
    if rank == 0:
        with liveness.waiting("reward", on="reward-server"):
            threading.Event().wait(PAUSE_S)
    dist.barrier()


def is_stopped_and_goes_on(rank: int) -> None:
    if rank == 0:
        subprocess.Popen(["/bin/sh", "-c", f"sleep {PAUSE_S}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def holds_the_gil(rank: int) -> None:
    if rank == 0:
        ctypes.PyDLL(None).sleep(int(PAUSE_S))
    dist.barrier()


def saves_beside_its_evaluation(rank: int) -> None:
    """Each side waits for the other's other thread: a circle of processes, and of no threads."""
    saves, trains = dist.new_group([0, 1]), dist.new_group([0, 1])

    def save() -> None:
        dist.all_reduce(torch.ones(1), group=saves)
        time.sleep(PAUSE_S * rank)
        dist.all_reduce(torch.ones(1), group=saves)

    saving = threading.Thread(target=save, name="save")
    saving.start()
    dist.all_reduce(torch.ones(1), group=trains)
    time.sleep(PAUSE_S * (1 - rank))
    dist.all_reduce(torch.ones(1), group=trains)
    saving.join()


def reshapes(rank: int) -> None:
    """A backend compares types and numbers of elements, no shapes; rank 2 is late."""
    if rank == 2:
        time.sleep(PAUSE_S)
    dist.all_reduce(torch.ones(6) if rank else torch.ones(2, 3))


HEALTHY = {
    evaluates_in_a_subprocess: 2,
    sleeps: 3,
    declares_a_wait: 2,
    declares_a_wait_for_an_unwatched_process: 2,
    is_stopped_and_goes_on: 2,
    holds_the_gil: 2,
    saves_beside_its_evaluation: 2,
    reshapes: 3,
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(HEALTHY, tmp_path_factory.mktemp("healthy"), policy="abort")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(body, id=body.__name__, marks=[] if number < Programs.AT_A_TIME else pytest.mark.nightly)
        for number, body in enumerate(HEALTHY)
    ],
)
def test_a_healthy_run_that_pauses_continues_and_is_reported_twice_at_most(body: Body, healthy: Programs) -> None:
    outcome = healthy.outcome(body)
    lines = [line for text in outcome.outputs for line in text.splitlines() if line.startswith("offbeat liveness")]
    assert outcome.exit_codes == [0] * HEALTHY[body], lines
    assert len(lines) <= 2, lines
    kinds = ("offbeat liveness: suspicion: ", "offbeat liveness: it moves again: ")
    assert all(line.startswith(kinds) for line in lines), lines
    assert not [each for each in outcome.verdicts if each.is_proof]


def pauses_again_and_again(rank: int) -> None:
    for _ in range(4):
        time.sleep(2 * STALL_S * rank)
        step()
    time.sleep(STALL_S)


@pytest.mark.nightly
def test_a_pause_that_comes_again_and_again_is_reported_once(tmp_path: Path) -> None:
    outcome = launch(pauses_again_and_again, 2, tmp_path, policy="abort")
    lines = [line for text in outcome.outputs for line in text.splitlines() if line.startswith("offbeat liveness")]
    assert [line.split(":")[1] for line in lines] == [" suspicion", " it moves again"]


def test_a_suspicion_says_when_it_is_acted_upon(healthy: Programs) -> None:
    outcome = healthy.outcome(sleeps)
    assert "not acted upon before" in outcome.outputs[0]
    assert "when the timeout of the default group is over" in outcome.outputs[0]


def calls_something_else(rank: int) -> None:
    if rank:
        step()
    dist.barrier()
    time.sleep(100)


def goes_in_circles(rank: int) -> None:
    dp, cp = dist.new_group([0, 1]), dist.new_group([0, 1])
    liveness.name_group(dp, ("dp",))
    liveness.name_group(cp, ("cp",))
    for group in (dp, cp) if rank else (cp, dp):
        dist.all_reduce(torch.ones(1), group=group)


def receives_first(rank: int) -> None:
    dist.recv(torch.ones(1), src=1 - rank)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (calls_something_else, "different-op"),
        pytest.param(goes_in_circles, "different-order", marks=pytest.mark.nightly),
        pytest.param(receives_first, "wait-cycle", marks=pytest.mark.nightly),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_a_proof_ends_the_run_before_its_timeout(body: Body, kind: str, tmp_path: Path) -> None:
    outcome = launch(body, 2, tmp_path, policy="abort")
    assert outcome.only.kind == kind
    assert outcome.only.is_proof
    assert outcome.only.stalled_s <= STALL_S + 2
    if kind == "different-order":
        assert {link.axes for link in outcome.only.links} == {("dp",), ("cp",)}
    assert outcome.exit_codes == [ABORTED] * 2


CHUNKS = 40


def fails_while_another_writes(handles: bool) -> Body:
    def body(rank: int) -> None:
        if rank == 2:
            raise ValueError("batch 7 is empty")
        if rank == 0:
            if handles:
                signal.signal(signal.SIGTERM, lambda *_: os.write(2, b"the handler ran\n"))
            for _ in range(CHUNKS):
                os.write(1, b"x" * 1000 + b"\n")
                time.sleep(0.1)
            os.write(1, b"complete\n")
        step()

    return body


@pytest.mark.nightly
@pytest.mark.parametrize("handles", [True, False])
def test_what_a_rank_writes_while_the_run_is_ended_is_complete(
    handles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBEAT_LIVENESS_GRACE_S", "10")
    outcome = launch(fails_while_another_writes(handles), 3, tmp_path, policy="abort")
    assert outcome.only.kind == "dead-peer"
    assert outcome.outputs[0].count("x" * 1000) == CHUNKS
    assert "complete" in outcome.outputs[0]
    assert ("the handler ran" in outcome.outputs[0]) == handles
    assert outcome.exit_codes[2] == 1  # its own, as without us
    assert outcome.exit_codes[1] in (ABORTED, 1)  # gloo's error may set it free first


def raises_alone(rank: int) -> None:
    if rank == 1:
        raise ValueError("this one is over")
    time.sleep(2)  # in no wait for it, and done without it


@pytest.mark.nightly
def test_a_rank_that_no_other_waits_for_may_raise(tmp_path: Path) -> None:
    outcome = launch(raises_alone, 2, tmp_path, policy="abort")
    assert outcome.exit_codes == [0, 1]
    assert outcome.verdicts == []


def busy_beside_a_hang(rank: int) -> None:
    """A thread with a group of its own keeps running; the main threads are stuck."""
    side = dist.new_group([0, 1])

    def talk() -> None:
        while True:
            dist.all_reduce(torch.ones(1), group=side)
            time.sleep(0.2)

    threading.Thread(target=talk, daemon=True, name="talk").start()
    if rank == 1:
        time.sleep(100)
    dist.barrier()


@pytest.mark.nightly
def test_a_hang_is_reported_though_another_thread_keeps_communicating(tmp_path: Path) -> None:
    verdict = launch(busy_beside_a_hang, 2, tmp_path, policy="strict", stall_after_s=2.0).verdicts[0]
    assert verdict.missing == ("rank 1",)
    assert verdict.group == "0"
    assert "acted upon now, as the policy is strict" in verdict.text


def verdict(**more: object) -> Verdict:
    base: dict[str, object] = {"kind": "missing-member", "headline": "rank 1 has not come", "stalled_s": 70.0}
    return Verdict(**{**base, "time_s": 0.0, "missing": ("rank 1",), **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "found", "ends"),
    [
        ("report", verdict(certainty="proof"), False),
        ("abort", verdict(certainty="proof"), True),
        ("abort", verdict(), False),
        ("abort", verdict(due_in_s=1.0), False),
        ("abort", verdict(due_in_s=-1.0), False),  # torch itself comes first
        ("abort", verdict(due_in_s=-6.0), True),
        ("abort", verdict(kind="straggler", due_in_s=-600.0), False),
        ("replace", verdict(certainty="proof"), True),  # of what no new process mends
        ("replace", verdict(certainty="proof", fate="killed"), False),
        ("replace", verdict(certainty="proof", fate="killed", due_in_s=-6.0), True),
        ("abort", verdict(certainty="proof", fate="killed"), True),
        ("strict", verdict(), True),
        ("strict", verdict(kind="straggler"), False),
    ],
)
def test_what_a_policy_ends(policy: str, found: Verdict, ends: bool) -> None:
    assert must_end(found, policy) is ends  # type: ignore[arg-type]


class NoPeers:
    secret = ""

    def running(self) -> dict[object, object]:
        return {}

    def own_name(self) -> str:
        return "rank 0"


@pytest.fixture
def announcer() -> Announcer:
    return Announcer(Settings(), NoPeers(), DumpWriter(None), lambda: None, print, None)  # type: ignore[arg-type, return-value]


def test_a_pause_is_reported_again_when_it_lasts_twice_as_long_as_it_ever_did(
    announcer: Announcer, capfd: pytest.CaptureFixture[str]
) -> None:
    def reports(stalled_s: float, missing: str = "rank 1") -> int:
        late = verdict(stalled_s=stalled_s, time_s=time.time(), missing=(missing,))
        announcer.announce(late, ends_run=False, is_due=False)
        return capfd.readouterr().err.count("suspicion")

    assert reports(70.0) == 1
    announcer.announce_end(Ending("it moves again"))
    assert reports(70.0, "rank 2") == 0, "each in its turn"
    announcer.announce_end(Ending("it moves again"))
    assert [reports(80.0), reports(100.0), reports(139.0), reports(141.0), reports(200.0)] == [0, 0, 0, 1, 0]


def test_that_a_wait_was_given_up_is_reported_once_no_error_can_be_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has raised prints its error before it reports it: until then it seems to continue."""
    reported: list[str] = []
    now_s = [100.0]
    monkeypatch.setattr(_monitor, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monitor = SimpleNamespace(
        _open_since_s=float("inf"), _announcer=SimpleNamespace(announce_end=lambda end: reported.append(end.what))
    )
    for now_s[0], ending in ((100.0, Ending("went on", is_open=True)), (104.0, Ending("went on", is_open=True))):
        _monitor.Monitor._end_stall(cast("Any", monitor), ending)
    assert reported == []
    _monitor.Monitor._end_stall(cast("Any", monitor), Ending("failed", has_failed=True))
    now_s[0] = 110.0
    _monitor.Monitor._end_stall(cast("Any", monitor), Ending("went on", is_open=True))
    now_s[0] = 115.0
    _monitor.Monitor._end_stall(cast("Any", monitor), Ending("went on", is_open=True))
    assert reported == ["failed", "went on"]


def test_that_a_missing_rank_moves_is_no_news(announcer: Announcer, capfd: pytest.CaptureFixture[str]) -> None:
    """On a busy machine a rank that sleeps seems to, now and then; nor is it that the same rank stands again."""
    counts = []
    for kind, seq in (("missing-member", 1), ("straggler", 1), ("missing-member", 1), ("missing-member", 2)):
        announcer.announce(verdict(kind=kind, seq=seq), ends_run=False, is_due=False)
        announcer._spoke_s -= 1000.0
        counts.append(capfd.readouterr().err.count("suspicion"))
    assert counts == [1, 0, 0, 1]


def test_a_leader_that_only_reports_notifies_the_others_when_the_time_is_over(
    announcer: Announcer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[float] = []
    monkeypatch.setattr(
        announcer, "_send_to_others", lambda message, num_tries: sent.append(message["verdict"]["due_in_s"])
    )
    for due_in_s in (1700.0, 1000.0, -6.0, -60.0):
        found = verdict(due_in_s=due_in_s)
        announcer.announce(found, ends_run=must_end(found, "report"), is_due=must_end(found, "abort"))
    assert sent == [1700.0, -6.0]


LATE = verdict(kind="straggler")
GONE = verdict(kind="dead-peer", certainty="proof")


@pytest.mark.parametrize(
    ("looks", "found"),
    [
        ([LATE, GONE, None], None),  # rank 1 came and left while the heads were read
        ([LATE, LATE], LATE),
        ([LATE, GONE, GONE, GONE], GONE),
        ([GONE, GONE, LATE, LATE], LATE),
        ([GONE, GONE, LATE] * 3, dataclasses.replace(GONE, certainty="suspicion")),
    ],
)
def test_looks_must_agree_one_after_the_other(
    looks: list[Verdict | None], found: Verdict | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_monitor, "CONFIRM_S", 0.0)
    left = iter(looks)
    monitor: Any = SimpleNamespace(verdict=None, _look=lambda: (next(left), None))
    assert _monitor.Monitor._find(monitor)[0] == found


@pytest.mark.parametrize("policy", ["report", "abort"])
def test_a_proof_is_reported_once_however_long_it_stands(policy: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """On one side a look at a run that only reports, every few seconds; on the other what it sends the others."""
    seen: list[Verdict] = []
    reporter = Announcer(Settings(), NoPeers(), DumpWriter(None), lambda: None, print, seen.append)  # type: ignore[arg-type, return-value]
    for seconds in (60.0, 65.0, 70.0):
        proof = dataclasses.replace(GONE, stalled_s=seconds, time_s=seconds)
        if policy == "report":
            reporter.announce(proof, ends_run=False, is_due=True)
        else:
            reporter.receive(proof, "rank 3", ends_run=True)
    assert len(seen) == 1
    assert capfd.readouterr().err.count("dead-peer") == 1


CONSOLE = """
import code
import offbeat_liveness as liveness
monitor = liveness.watch(stall_after_s=1)
code.InteractiveConsole().runsource("no_such_name")
print(monitor.head().state)
raise ValueError("the end")
"""


def test_an_error_typed_into_a_console_is_not_the_end_of_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", CONSOLE], capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "running"
    assert "NameError" in ended.stderr
    assert ended.stderr.rstrip().endswith("ValueError: the end")
    assert "Error in sys.excepthook" not in ended.stderr


AT_EXIT = """
import atexit, threading, time
def look():
    print([each.name for each in threading.enumerate() if each.name.startswith("offbeat")])
atexit.register(look)  # runs after what was registered later
import torch.distributed as dist
import offbeat_liveness
offbeat_liveness.watch()
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
time.sleep(1)
dist.barrier()
"""


def test_no_thread_of_ours_is_left_when_python_ends() -> None:
    """One that comes back from torch's code after that ends the process with SIGABRT."""
    ended = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[]"


def feeder_raises(rank: int) -> None:
    samples: queue.Queue[int] = queue.Queue()

    def feed() -> None:
        raise KeyError("no such shard")

    if rank == 0:
        threading.Thread(target=feed, name="feeder").start()
        with liveness.waiting("samples.get"):
            samples.get()
    step()


@pytest.mark.nightly
def test_a_thread_that_an_exception_has_ended_is_reported(tmp_path: Path) -> None:
    text = launch(feeder_raises, 2, tmp_path).only.text
    assert "rank 0: its thread 'feeder' was ended by KeyError: 'no such shard' at" in text


def test_no_process_leaves_before_one_that_has_failed_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that one leads, and sends `leave` to the others at once: its exit code is to come first."""
    left = threading.Event()
    monkeypatch.setattr(_announcer, "leave", left.set)
    is_going = threading.Event()
    is_going.set()
    stuck = ProcessSnapshot(key="vm:1", name="rank 0", waits=(Wait(kind="collective", what="all_reduce", age_s=9.0),))
    dumps: Any = SimpleNamespace(flush=lambda limit_s: None)
    ending = _announcer.Termination(cast("Peers", None), dumps, 10.0, lambda: stuck, is_going.is_set)
    ending.receive_leave()  # of a suspicion that was reported before, and ended nothing
    assert not ending._may_leave.is_set()
    ending.begin(leads=False, ends=True)
    ending.receive_leave()
    assert not left.wait(0.5)
    is_going.clear()
    assert not left.wait(0.5), "its launcher may not have seen it yet"
    assert left.wait(5.0)
