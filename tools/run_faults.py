"""What may happen to a run that trains: the rows of docs/reliability.md."""

import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from fake_hosts import FakeHosts
from role_faults import Job, role_pids, signal_role

from offbeat_testing import RunningCommand, wait_until_gone

AGAIN: Final = "is started again"
LONGER: Final = ("--rollout.max_tokens=64", "--rollout.max_model_len=128", "--rollout.samples_per_prompt=8")


@dataclass
class Scene:
    """A run that trains, in the middle of which something happens.

    Args:
        job: what it trains.
        process: its driver.
        undo: what ends the fault.
        hosts: of the cluster it runs on; None: this machine.
    """

    job: Job
    process: RunningCommand
    undo: ExitStack
    hosts: FakeHosts | None = None


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
        num_hosts: it runs on a Ray cluster of so many hosts with a CPU each, which takes root too; 0: it does not.
    """

    name: str
    inject: Callable[[Scene], None]
    happens: str
    noticed_by: str = AGAIN
    words: tuple[str, ...] = ()
    undo_after_s: float | None = None
    ends_with: int = 0
    needs_root: bool = False
    num_hosts: int = 0


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


def lose_host(scene: Scene) -> None:
    """Let the host of rollout-1 go, with all that runs there."""
    assert scene.hosts is not None
    scene.hosts.lose(scene.hosts.host_of("rollout-1"))


def cut_host(scene: Scene) -> None:
    """Pull the cable of the host of rollout-1."""
    assert scene.hosts is not None
    scene.hosts.cut(scene.hosts.host_of("rollout-1"))


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
    Fault(
        name="Ray: the host of an engine is lost",
        inject=lose_host,
        happens="its engine is started again on a host with room, and given the trainer's weights over TCP",
        words=LONGER,
        num_hosts=4,
    ),
    Fault(
        name="Ray: the network to an engine's host is cut",
        inject=cut_host,
        happens="nothing is heard of the host for `cluster.silent_after_s` (10 s): given up, then as above",
        words=LONGER,
        num_hosts=4,
    ),
    Fault(
        name="Ray: the host of an engine is lost, and no other has room",
        inject=lose_host,
        happens="the engine leaves the run, and the other one goes on",
        noticed_by="has no place any more",
        words=LONGER,
        num_hosts=3,
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
