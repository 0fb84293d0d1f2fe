"""Reader of torch's recorder of nccl, which does not hang with it.

Only the device knows the state of its entries: a dump queries the CUDA events of all that are not over. Torch's source
says of such a query that it "can hang if another thread is holding the CUDA global context lock", as
`cudaStreamSynchronize` does, which is what a stuck process stands in. The Python functions (`_dump_nccl_trace`) keep
the GIL meanwhile: the whole process would hang because of its monitor's question, and then be blamed for it.

So it is asked through torch's own server of such questions (`_WorkerServer`), whose threads are C++ and hold no GIL:
over a socket in a folder that only this user can enter, made at the first question (torch then says "Server
listening" on stderr, once). If no answer comes for `ANSWER_S`, the monitor continues without, and does not ask again
before it has come. While nccl's counters do not change the entries do not either, so it asks every `FRESH_S` at most.

A dump reads two tables without their lock (see `flight_recorder`). Without the GIL, a thread that uses a group of nccl
for the very first time within those microseconds could meet it there; but the monitor asks only after a quiet while.

Source: pytorch, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (finishedGPUExecutionInternal), FlightRecorderCuda.cpp
(dump_nccl_trace_pickle), init.cpp (_dump_nccl_trace), and FlightRecorderDetail.hpp of 2.13 (dump_entries).
"""

import atexit
import ctypes
import http.client
import os
import pickle
import select
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Final

RawEntry = dict[str, Any]
"""An entry of a recorder as torch pickles it."""
HANDLER: Final = "dump_nccl_trace_pickle"
ANSWER_S: Final = 0.3
FRESH_S: Final = 5.0


class NcclRecorder:
    """Asks nccl's recorder, and remembers whether the answer has come within `answer_s`.

    Attributes:
        folder: where the socket of torch's server lies, "" before the first question.
        asked_at_s: monotonic time of a question without an answer; None while there is none. A process that
            is silent soon after it may be so because it was asked.
    """

    def __init__(self, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self.clear()

    def clear(self) -> None:
        """Forget everything: in a forked child the server's threads do not exist."""
        self._pid = os.getpid()
        self._asking = threading.Lock()
        self._path = self.folder = ""
        self._open: socket.socket | None = None
        self._entries: list[RawEntry] | None = None
        self._status, self._read_s = "", -FRESH_S
        self.asked_at_s: float | None = None

    def entries(self, status: str, dump: Callable[[], bytes], *, with_frames: bool) -> list[RawEntry] | None:
        """Return what nccl's recorder holds, oldest first; None while it does not answer.

        While `status` stays the same, entries do; `dump` asks the recorder directly, for a torch without a server.
        """
        if self._pid != os.getpid():
            self.clear()
        with self._asking:
            is_fresh = time.monotonic() - self._read_s < FRESH_S
            if self._entries is None or status != self._status or not is_fresh:
                answer = self._ask(with_frames) if _has_server() else self._ask_directly(dump)
                if answer is None:
                    return None
                self._entries = list(pickle.loads(answer).get("entries", ()))  # of this process, of a moment ago
                self._status, self._read_s = status, time.monotonic()
            return self._entries

    def _ask_directly(self, dump: Callable[[], bytes]) -> bytes:
        """Ask a torch whose recorder has no server (other makers' builds): this may block with the GIL held."""
        self.asked_at_s = time.monotonic()
        answer = dump()
        self.asked_at_s = None
        return answer

    def _ask(self, with_frames: bool) -> bytes | None:
        if self._open is not None and not _is_answered(self._open):
            return None
        if self._open is not None:  # an answer to a question of long ago
            self._open.close()
        self.asked_at_s = time.monotonic()
        self._open = socket.socket(socket.AF_UNIX)
        self._open.settimeout(self._answer_s)
        try:
            answer = self._converse(self._open, with_frames)
        except TimeoutError:
            return None  # the connection stays: its answer ends the question
        except (OSError, RuntimeError, http.client.HTTPException):  # torch raises RuntimeError without a server
            answer = None
        self._open.close()
        self._open = None
        if answer is not None:
            self.asked_at_s = None
        return answer

    def _converse(self, connection: socket.socket, with_frames: bool) -> bytes | None:
        connection.connect(self._server())
        question = http.client.HTTPConnection("localhost")
        question.sock = connection
        words = f"includecollectives=true&includestacktraces={str(with_frames).lower()}&onlyactive=false"
        question.request("POST", f"/handler/{HANDLER}?{words}", headers={"Connection": "close"})
        reply = http.client.HTTPResponse(connection)  # not getresponse(): it closes the connection when it fails
        reply.begin()
        content = reply.read()
        return content if reply.status == http.client.OK else None

    def _server(self) -> str:
        """Path of the socket of torch's server, which is made when first needed and lives as long as the process."""
        if not self._path:
            folder = tempfile.mkdtemp(prefix="offbeat-recorder-")
            path = os.path.join(folder, "socket")
            try:
                server = _binding()._WorkerServer(path)
            except RuntimeError:  # the path is too long for a socket, for one
                _remove(folder, os.getpid())
                raise
            atexit.register(_remove, folder, os.getpid())
            # Its destructor waits for its threads, and one may wait for a device for ever: so it is never destroyed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
            self.folder, self._path = folder, path
        return self._path


def remove_folder() -> None:
    """Remove the socket's folder, for a process that exits without Python's own finalization."""
    if NCCL.folder:
        _remove(NCCL.folder, os.getpid())


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:  # not a forked child's to remove
        shutil.rmtree(folder, ignore_errors=True)


def _is_answered(connection: socket.socket) -> bool:
    poll = select.poll()  # select() takes no descriptor from 1024 on
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _has_server() -> bool:
    binding = _binding()
    return hasattr(binding, "_WorkerServer") and HANDLER in binding._get_handler_names()


def _binding() -> Any:
    return sys.modules["torch._C._distributed_c10d"]


NCCL: Final = NcclRecorder()
