"""Runs small distributed programs, many at a time, forked from a process that has imported torch already.

Each run is an agent, as torchrun has one: it forks the ranks, hosts their store, and ends them. So a test of forty
programs on 2, 4 and 8 ranks imports torch once.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import pdb
import pty
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

PR_SET_PDEATHSIG: Final = 1
# Torch's message about the missing DNS, see `_fork_agent`.
NO_NAME: Final = "[c10d] The hostname of the client socket cannot be retrieved"
# How long the last rank may stay behind the others.
LAST_RANK_S: Final = 3.0
# How long the children of a killed rank may take to end.
CHILDREN_S: Final = 5.0
# The beginning of the monitor's own lines, and the text of its short lines, which only point to another rank's report.
HEADLINE: Final = "offbeat liveness: "
SUSPICION: Final = f"{HEADLINE}suspicion: "
POINTER: Final = ", reported in full by "
CLEARING: Final = "moves again"
FAILURE: Final = f"{HEADLINE}the wait has failed"
# What the programs use; imported once, not by each rank.
PRELOADED: Final = ("torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel")


@dataclass(frozen=True, kw_only=True)
class Act:
    """Act from outside on a rank while it runs.

    Args:
        at_s: when, in seconds from the start of the run.
        rank: the rank it acts on.
        signal: sent to it; None sends none.
        text: typed at its terminal; a rank that is typed at has one.
    """

    at_s: float
    rank: int
    signal: int | None = None
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class FaultRun:
    """One program and the number of ranks to run it on.

    Args:
        script: the program.
        size: how many ranks.
        stall_after_s: of the liveness monitor; None runs plain torch.
        policy: of the liveness monitor.
        gloo_timeout_s: default timeout of torch's groups, instead of torch's 30 minutes; None leaves it.
        limit_s: when every rank is killed.
        environment: variables set for the program.
        acts: what is done to the ranks from outside, in the order of time.
        unwatched: ranks that run without the monitor.
        last_rank_s: how long the last rank may stay behind the others.
    """

    script: Path
    size: int
    stall_after_s: float | None = None
    policy: Literal["report", "abort"] = "abort"
    gloo_timeout_s: float | None = None
    limit_s: float = 20.0
    environment: tuple[tuple[str, str], ...] = ()
    acts: tuple[Act, ...] = ()
    unwatched: tuple[int, ...] = ()
    last_rank_s: float = LAST_RANK_S


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of the monitor on a rank's stderr: its first line.

    Args:
        rank: the rank whose stderr it is on.
        what: "proof", "suspicion", "clearing": it moves again, or "failure": the ranks that waited were ended.
        text: without the common beginning.
    """

    rank: int
    what: Literal["proof", "suspicion", "clearing", "failure"]
    text: str


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Outcome of a run.

    Args:
        exit_codes: of each rank; negative for a signal, None for a rank that was there until the limit.
        left_s: when each rank left, in seconds from the start.
        outputs: stdout and stderr of each rank.
        verdict: the first that liveness wrote, as plain data; a straggler (which never ends a run) only if it is alone.
        verdict_s: when it was found, in seconds from the start.
        seconds: how long the run took.
        verdicts: all that liveness wrote, in the order of time, with the seconds from the start.
    """

    exit_codes: dict[int, int | None] = field(default_factory=dict)
    left_s: dict[int, float] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    verdict: dict[str, Any] | None = None
    verdict_s: float | None = None
    seconds: float = 0.0
    verdicts: tuple[tuple[float, dict[str, Any]], ...] = ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the monitors' messages, each once: the lines that point to another rank's are left out."""
        lines = [(rank, line) for rank, output in self.outputs.items() for line in output.splitlines()]
        return tuple(_message(rank, line) for rank, line in lines if HEADLINE in line and POINTER not in line)

    def first(self, *, proof: bool) -> tuple[float, dict[str, Any]] | None:
        """Return the first verdict that is a proof, or the first that is a suspicion."""
        return next((each for each in self.verdicts if is_proof(each[1]) == proof), None)


def is_proof(verdict: dict[str, Any]) -> bool:
    """Return whether a verdict, as plain data, is more than a suspicion."""
    return verdict["kind"] != "straggler" and not verdict.get("text", "").startswith(SUSPICION)


def _message(rank: int, line: str) -> Message:
    text = line[line.index(HEADLINE) :]  # a prompt of the program may come before it
    if CLEARING in text:
        return Message(rank=rank, what="clearing", text=text.removeprefix(HEADLINE))
    if text.startswith(FAILURE):
        return Message(rank=rank, what="failure", text=text.removeprefix(HEADLINE))
    is_suspicion = text.startswith((SUSPICION, f"{HEADLINE}straggler: "))
    return Message(rank=rank, what="suspicion" if is_suspicion else "proof", text=text.removeprefix(HEADLINE))


def run_faults(runs: Iterable[FaultRun], *, num_ranks_at_once: int = 8) -> Generator[tuple[FaultRun, Observation]]:
    """Run them all, as many at once as keeps the number of ranks in bounds; yields each when it has ended."""
    waiting = sorted(runs, key=lambda run: run.size)
    for module in (*PRELOADED, *(["offbeat_liveness"] if any(run.stall_after_s for run in waiting) else [])):
        importlib.import_module(module)
    running: dict[int, tuple[FaultRun, tempfile.TemporaryDirectory[str], float]] = {}
    try:
        while waiting or running:
            load = sum(run.size for run, _, _ in running.values())
            while waiting and (load == 0 or load + waiting[-1].size <= num_ranks_at_once):
                run = waiting.pop()
                folder = tempfile.TemporaryDirectory(prefix="fault-", ignore_cleanup_errors=True)
                running[_fork_agent(run, Path(folder.name))] = (run, folder, time.time())
                load += run.size
            ended = [process for process in running if os.waitpid(process, os.WNOHANG)[0]]
            for process in ended:
                run, folder, start_s = running.pop(process)
                with folder:
                    yield run, _observation(run, Path(folder.name), start_s)
            if not ended:
                time.sleep(0.02)
    finally:
        for process in running:
            os.kill(process, signal.SIGTERM)
            os.waitpid(process, 0)


class Results:
    """A runner of many runs at a time, which returns each result on request.

    Args:
        wanted: all that will be asked for.
        num_ranks_at_once: as in `run_faults`.
    """

    def __init__(self, wanted: Iterable[FaultRun], *, num_ranks_at_once: int) -> None:
        self._ended: dict[FaultRun, Observation] = {}
        self._runs = run_faults(wanted, num_ranks_at_once=num_ranks_at_once)

    def of(self, run: FaultRun) -> Observation:
        """Return what became of a run; back when it has ended."""
        while run not in self._ended:
            ended, observation = next(self._runs)
            self._ended[ended] = observation
        return self._ended[run]

    def close(self) -> None:
        """End the runs that are still going."""
        self._runs.close()


def _observation(run: FaultRun, folder: Path, start_s: float) -> Observation:
    if not (folder / "ends.json").is_file():
        raise RuntimeError(f"the agent of {run} failed\n{_output(folder / 'agent.log')}")
    ends = json.loads((folder / "ends.json").read_text())
    verdicts = sorted(
        (json.loads(path.read_text()) for path in (folder / "liveness").glob("verdict*.json")),
        key=lambda verdict: float(verdict["time_s"]),
    )
    fatal = [each for each in verdicts if each["kind"] != "straggler"]
    verdict = next(iter(fatal or verdicts), None)
    return Observation(
        exit_codes={rank: ends[str(rank)]["code"] for rank in range(run.size)},
        left_s={rank: ends[str(rank)]["at_s"] - start_s for rank in range(run.size)},
        outputs={rank: _output(folder / f"{rank}.log") for rank in range(run.size)},
        verdict=verdict,
        verdict_s=verdict["time_s"] - start_s if verdict else None,
        seconds=time.time() - start_s,
        verdicts=tuple((float(each["time_s"]) - start_s, each) for each in verdicts),
    )


def _output(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines(keepends=True)
    return "".join(line for line in lines if NO_NAME not in line)


def _fork_agent(run: FaultRun, folder: Path) -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            _follow_parent()
            # A TCPStore asks for the name of each address that connects. Nothing here needs the DNS, and where it is
            # slow to answer, 5 s are gone.
            os.environ["RES_OPTIONS"] = "attempts:0"
            _redirect(folder / "agent.log")
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
            _agent(run, folder)
            code = 0
        except BaseException:  # noqa: BLE001 - the last frame of this process
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return process


def _agent(run: FaultRun, folder: Path) -> None:
    """Fork the ranks, host their store, and wait for them; no process is left behind."""
    from torch._C._distributed_c10d import TCPStore

    read_end, write_end = os.pipe()
    terminals = {act.rank: pty.openpty() for act in run.acts if act.text}
    ranks = {_fork_rank(run, rank, folder, (read_end, write_end), terminals): rank for rank in range(run.size)}
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=run.limit_s))
    os.write(write_end, f"{store.port:5d}".encode() * run.size)
    ends: dict[int, dict[str, Any]] = {}
    start_s = time.monotonic()
    until_s, to_do = start_s + run.limit_s, list(run.acts)
    try:
        while len(ends) < run.size and time.monotonic() < until_s:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process in ranks:
                ends[ranks[process]] = {"code": os.waitstatus_to_exitcode(status), "at_s": time.time()}
                if len(ends) == run.size - 1:  # a rank alone cannot continue
                    until_s = min(until_s, time.monotonic() + run.last_rank_s)
            elif to_do and time.monotonic() >= start_s + to_do[0].at_s:
                _act(to_do.pop(0), {rank: process for process, rank in ranks.items() if rank not in ends}, terminals)
            else:
                time.sleep(0.01)
    finally:
        for process, rank in ranks.items():
            if rank not in ends:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                ends[rank] = {"code": None, "at_s": time.time()}
            _kill_children_of(process)
    (folder / "ends.json").write_text(json.dumps(ends))


def _kill_children_of(process: int) -> None:
    """Kill the processes that a rank has started and left behind, and return when they are gone and write no more."""
    until_s = time.monotonic() + CHILDREN_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until_s:
            os.killpg(process, signal.SIGKILL)
            time.sleep(0.01)


def _act(act: Act, running: dict[int, int], terminals: dict[int, tuple[int, int]]) -> None:
    if act.rank in running and act.signal is not None:
        os.kill(running[act.rank], act.signal)
    if act.text:
        os.write(terminals[act.rank][0], act.text.encode())


def _fork_rank(
    run: FaultRun, rank: int, folder: Path, pipe: tuple[int, int], terminals: dict[int, tuple[int, int]]
) -> int:
    process = os.fork()
    if process == 0:
        try:
            os.setpgid(0, 0)
            _follow_parent()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(pipe[1])
            _redirect(folder / f"{rank}.log")
            if rank in terminals:
                os.dup2(terminals[rank][1], 0)
                sys.stdin = os.fdopen(0, "r", closefd=False)
            _set_up_rank(run, rank, int(os.read(pipe[0], 5)))
            code = _run_as_main(run, rank, folder)
        except BaseException as error:  # noqa: BLE001 - the last frame of this process
            print(repr(error), file=sys.stderr)
            code = 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return process


def _set_up_rank(run: FaultRun, rank: int, port: int) -> None:
    """Set what torchrun would have set."""
    import torch
    from torch.distributed import distributed_c10d

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(run.size), LOCAL_WORLD_SIZE=str(run.size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(run.environment)
    if run.gloo_timeout_s is not None:
        distributed_c10d.default_pg_timeout = timedelta(seconds=run.gloo_timeout_s)


def _run_as_main(run: FaultRun, rank: int, folder: Path) -> int:
    """Run the program as the interpreter would: hooks for an uncaught exception, then exit handlers of this process."""
    atexit._clear()
    faulthandler.disable()  # pytest's, which writes where pytest does
    importlib.reload(pdb)  # pytest puts its own set_trace in place, which wants a terminal of pytest's
    if run.stall_after_s is not None and rank not in run.unwatched:
        import offbeat_liveness as liveness

        liveness.watch(stall_after_s=run.stall_after_s, policy=run.policy, directory=folder / "liveness")
    code = 0
    try:
        runpy.run_path(str(run.script), run_name="__main__")
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        code = 1
    with contextlib.suppress(AttributeError):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code


def _follow_parent() -> None:
    """End with the parent, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _redirect(path: Path) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
