"""The caller's side of its reward functions: a socket that scorers call them through, a thread for each call."""

import asyncio
import inspect
import json
import select
import socket
import socketserver
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any, Final, cast

from offbeat._calls import MAX_LINE_BYTES, SOCKET_VARIABLE, Call, encode_failure, encode_result
from offbeat_data import FunctionFailure

MAX_CALLS: Final = 1024
"""Calls under way at most. A run makes reward.num_processes + reward.concurrency at a time, 72 by default; what is more
are functions that have not returned though their time is over, which no thread can be stopped in."""
LOOK_EVERY_S: Final = 0.5
"""Between two looks whether the scorer that waits for a coroutine is still there."""
_BACKLOG: Final = 128
"""Connections that wait to be accepted: a run opens up to 72 at once."""
_MAX_PATH_BYTES: Final = 100
"""Longest path of a Unix socket, a little below the 104 of macOS and the 108 of Linux."""


class CallServer:
    """Serves functions to the scorers of one run, until it is closed. No other user gets at its socket.

    Args:
        functions: by the names that the run's configuration has.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="offbeat-")  # its mode is 0700
        path = str(Path(self._folder.name) / "calls")
        if len(path.encode()) > _MAX_PATH_BYTES:  # of a long TMPDIR
            self._folder.cleanup()
            self._folder = tempfile.TemporaryDirectory(prefix="offbeat-", dir="/tmp")
            path = str(Path(self._folder.name) / "calls")
        self._server = _Server(path, dict(functions))
        self.environment = {SOCKET_VARIABLE: path}
        threading.Thread(target=self._server.serve_forever, name="offbeat-calls", daemon=True).start()

    def close(self) -> None:
        """Take no more calls; one that is under way ends by itself, and its scorer is gone."""
        self._server.shutdown()
        self._server.server_close()
        self._server.end_loop()
        self._folder.cleanup()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True  # a function that hangs holds up neither the end of the run nor that of the program
    block_on_close = False
    request_queue_size = _BACKLOG

    def __init__(self, path: str, functions: dict[str, Callable[..., Any]]) -> None:
        super().__init__(path, _Handler)
        self.functions = functions
        self.free = threading.BoundedSemaphore(MAX_CALLS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def run(self, work: Any, caller: socket.socket) -> Any:
        """Return the result of a coroutine; it is cancelled when the caller has left, as after its deadline.

        All run in one event loop, to which belongs what they keep open.
        """
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="offbeat-coroutines", daemon=True).start()
        found = asyncio.run_coroutine_threadsafe(_awaited(work), self._loop)
        while not wait([found], LOOK_EVERY_S).done:
            if select.select([caller], [], [], 0)[0]:  # it sends no more: this is its end
                found.cancel()
        return found.result()

    def end_loop(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the scorer was ended while its function was called, as at a deadline."""


async def _awaited(work: Any) -> Any:
    return await work


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        raw = self.rfile.readline(MAX_LINE_BYTES + 1)
        if not raw.endswith(b"\n"):  # the scorer was ended, or sends more than any run has
            return
        line, server = json.loads(raw), cast(_Server, self.server)
        if "describe" in line:
            self.wfile.write(_describe(server.functions, line["describe"]))
        elif not server.free.acquire(blocking=False):
            text = f"{MAX_CALLS} calls have not returned: functions hang, or reward.concurrency is higher"
            self.wfile.write(encode_failure(FunctionFailure("TooManyCalls", text, is_fault=False), ""))
        else:
            try:
                self.wfile.write(_answer(server, Call.decode(line), self.connection))
            finally:
                server.free.release()


def _describe(functions: Mapping[str, Callable[..., Any]], name: str) -> bytes:
    """Return the parameters of a function as [name, kind, has a default], None where it has no signature."""
    if name not in functions:
        return json.dumps({"known": list(functions)}).encode() + b"\n"
    function = functions[name]
    parameters: list[Any] | None = None
    try:
        found = inspect.signature(function).parameters.values()
        parameters = [[each.name, each.kind.name, each.default is not each.empty] for each in found]
    except (TypeError, ValueError):  # a function of C
        pass
    waits = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    return json.dumps({"parameters": parameters, "waits": waits}).encode() + b"\n"


def _answer(server: _Server, call: Call, caller: socket.socket) -> bytes:
    function = server.functions[call.function]
    try:
        result = function(*call.args, **call.named)
        return encode_result(server.run(result, caller) if inspect.isawaitable(result) else result)
    except BaseException as error:  # noqa: BLE001  SystemExit too: it ends the call, and not the caller's program
        trace = "".join(traceback.format_exception(error))
        return encode_failure(FunctionFailure.of(function, error), trace)
