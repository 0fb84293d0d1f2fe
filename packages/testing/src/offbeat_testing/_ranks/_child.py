"""One rank: a fork of the test's process that runs the body, reports how it ended, and leaves."""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from offbeat_liveness import current_frames, watch
from offbeat_testing._processes import STACKS_SIGNAL
from offbeat_testing._ranks._report import (
    Message,
    Outcome,
    RankReport,
    RankState,
    RankVerdict,
    group_members,
    recorded_collectives,
    to_line,
)
from offbeat_testing._ranks._request import PerRank, RanksRequest

PR_SET_PDEATHSIG: Final = 1
LEAVE: Final = b"leave\n"
EXPLAIN: Final = b"explain\n"
JUDGE: Final = b"judge\n"
MONITOR_THREADS: Final = "offbeat-liveness"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """A process among those that run the test.

    Args:
        rank: this one.
        size: how many there are.
    """

    rank: int
    size: int


@dataclass(frozen=True, kw_only=True)
class RankPipes:
    """Pipe ends that a rank inherits, and a folder for its output and stacks.

    Args:
        captures: whether stdout and stderr go to files.
        parent: process id of the test's process.
    """

    rank: int
    orders: int
    reports: int
    folder: Path
    captures: bool
    parent: int

    def file(self, what: str) -> Path:
        """Return where this rank writes `what`."""
        return self.folder / f"rank-{self.rank}.{what}"


class Rank:
    """Runs the body in this process."""

    def __init__(self, pipes: RankPipes, request: RanksRequest, item: pytest.Function) -> None:
        self._pipes = pipes
        self._request = request
        self._item = item
        self._sending = threading.Lock()
        self._may_leave = threading.Event()
        self._monitor: Any = None
        self._error: BaseException | None = None

    def run(self) -> NoReturn:
        """Run, report, wait until all have, leave: no exit handler of the test's process runs here."""
        code = 1
        try:
            self._settle()
            outcome, text = self._outcome()
            at_s = time.monotonic()
            report = RankReport(outcome=outcome, text=_utf8(text), at_s=at_s, state=self._state(stacks=False))
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            self._send(report)
            if report.outcome in ("passed", "skipped"):
                self._may_leave.wait()  # until all are here: a connection that closes early would fail the others
            else:
                self._leave_world()
            code = 0
        except BaseException:  # noqa: BLE001 - the last place that can say anything: what follows is the end
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)

    def _leave_world(self) -> None:
        """Send the error to the other ranks, if the body has used offbeat-mesh."""
        if (worlds := sys.modules.get("offbeat_mesh._world")) and (world := worlds.current_world()):
            world.leave(self._error)

    def _settle(self) -> None:
        """Cut what ties this process to the one it was forked from."""
        self._born_ns = time.time_ns()
        os.setpgid(0, 0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pipes.parent:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if self._pipes.captures:
            sys.stdout = _redirect(1, self._pipes.file("stdout"))
            sys.stderr = _redirect(2, self._pipes.file("stderr"))
        stacks = self._pipes.file("stacks").open("w")
        faulthandler.enable(file=stacks)
        faulthandler.register(STACKS_SIGNAL, file=stacks)
        torch.set_num_threads(1)

    def _outcome(self) -> tuple[Outcome, str]:
        __tracebackhide__ = True
        try:
            if self._request.liveness:  # speaks when asked: the test's deadline comes first
                self._monitor = watch(stall_after_s=max(1.0, self._request.deadline_s), policy="report")
            self._join()
            threading.Thread(target=self._obey, daemon=True, name="ranks-orders").start()
            self._item.obj(**self._arguments())
        except pytest.skip.Exception as skipped:
            return "skipped", skipped.msg or ""
        except pytest.xfail.Exception as xfailed:
            return "expected", xfailed.msg or ""
        except BaseException as error:  # noqa: BLE001 - every end of the body is reported to the test's process
            self._error = error
            excinfo = pytest.ExceptionInfo.from_current()
            outcome: Outcome = "expected" if self._is_expected(excinfo.value) else "failed"
            return outcome, str(excinfo.getrepr(style="short", tbfilter=True))
        return "passed", ""

    def _is_expected(self, error: BaseException) -> bool:
        mark = self._item.get_closest_marker("xfail")
        raises = mark.kwargs.get("raises") if mark else None
        return raises is not None and isinstance(error, raises)

    def _join(self) -> None:
        """Become a rank as one of torchrun's: its environment, and a world unless the body wants to join by itself."""
        port = int(_read_line(self._pipes.orders))
        rank, size = str(self._pipes.rank), str(self._request.size)
        os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if not self._request.join:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
            return
        # Longer than the test's own deadline, whose error says more.
        timeout = timedelta(seconds=self._request.deadline_s + 60)
        store = FileStore(str(self._pipes.folder / "store"), self._request.size)
        store.set_timeout(timeout)
        dist.init_process_group(
            "gloo", store=store, rank=self._pipes.rank, world_size=self._request.size, timeout=timeout
        )

    def _arguments(self) -> dict[str, Any]:
        """Return the fixtures' values, with those of this rank where they differ between ranks."""
        rank, size = self._pipes.rank, self._request.size
        own = {"rank": lambda: rank, "ranks": lambda: Ranks(rank=rank, size=size), "mesh": self._mesh}
        wanted = self._item._fixtureinfo.argnames
        values = {name: self._item.funcargs[name] for name in wanted}
        return {name: own[name]() if isinstance(value, PerRank) else value for name, value in values.items()}

    def _mesh(self) -> Any:
        if not self._request.axes:
            pytest.fail("the fixture 'mesh' needs @pytest.mark.mesh(dp=…, tp=…) on the test", False)
        import offbeat_mesh

        # `check` compares the members' tensors before each call: a mismatch is then an error, not a hang.
        return offbeat_mesh.Mesh(**self._request.axes, deadline_s=self._request.deadline_s, check=True)

    def _obey(self) -> None:
        """Answer the test's process while the body runs or is stuck."""
        while order := _read_line(self._pipes.orders):
            if order == LEAVE:
                self._may_leave.set()
            elif order == EXPLAIN:
                self._send(self._state(stacks=True))
            elif order == JUDGE:
                verdict = self._monitor.ask() if self._monitor else None
                self._send(RankVerdict(text=verdict.text if verdict else ""))
        os._exit(1)

    def _state(self, *, stacks: bool) -> RankState:
        joined = dist.is_initialized()
        return RankState(
            collectives=recorded_collectives(self._born_ns) if joined else [],
            members=group_members() if joined else {},
            stacks=_utf8(_stacks()) if stacks else "",
        )

    def _send(self, message: Message) -> None:
        with self._sending, os.fdopen(os.dup(self._pipes.reports), "wb") as pipe:
            pipe.write(to_line(message))


def _utf8(text: str) -> str:
    """Return the text in characters that can travel: names of files may have others."""
    return text.encode(errors="backslashreplace").decode()


def _redirect(descriptor: int, path: Path) -> Any:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, descriptor)
    os.close(target)
    return os.fdopen(os.dup(descriptor), "w", buffering=1, errors="backslashreplace")


def _read_line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            return b""
        line += byte
    return line


def _stacks() -> str:
    """Return the stack of each thread but this one, innermost frame last, without what is below the test's body."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident, frame in current_frames().items():
        name = names.get(ident, str(ident))
        if ident == threading.get_ident() or name.startswith(MONITOR_THREADS):
            continue
        frames = traceback.extract_stack(frame)
        start = next((i + 1 for i, one in enumerate(frames) if one.filename == __file__ and one.name == "_outcome"), 0)
        texts.append(f"thread {name}:\n" + "".join(traceback.format_list(frames[start:])))
    return "".join(texts)
