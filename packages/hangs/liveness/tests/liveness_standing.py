"""Threads that really stand in a call, and what is read off them."""

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from offbeat_liveness._process.outside import may_act, outside_wait
from offbeat_liveness._process.snapshot import OutsideWait
from offbeat_liveness._process.stacks import current_frames

PATIENCE_S = 30.0


def wait_of(thread: threading.Thread) -> OutsideWait | None:
    frames = current_frames()
    frame = frames.get(thread.ident or 0)
    frames.clear()
    return outside_wait(frame, thread.native_id)


def acts(thread: threading.Thread) -> bool:
    frames = current_frames()
    frame = frames.get(thread.ident or 0)
    frames.clear()
    return may_act(frame)


def until(found: Callable[[], Any], what: str = "") -> Any:
    end_s = time.monotonic() + PATIENCE_S
    while not (answer := found()):
        assert time.monotonic() < end_s, what
        time.sleep(0.01)
    return answer


how_they_ended: list[BaseException] = []


def start(run: Callable[[], Any], name: str = "worker") -> threading.Thread:
    """Run something in a thread; what it raises in the end is no matter."""

    def quietly() -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - such as that the other side is closed under it
            how_they_ended.append(error)

    thread = threading.Thread(target=quietly, name=name, daemon=True)
    thread.start()
    return thread


def standing(run: Callable[[], Any], text: str, name: str = "worker") -> OutsideWait:
    """Start a thread, and what it waits for as soon as that says a text."""
    thread = start(run, name)
    last: list[OutsideWait | None] = [None]

    def found() -> OutsideWait | None:
        last[0] = wait_of(thread)
        return last[0] if last[0] is not None and text in last[0].text else None

    try:
        return until(found)  # type: ignore[no-any-return]
    except AssertionError:
        raise AssertionError(f"{text!r} is not in {last[0]}") from None


@contextmanager
def silent_server() -> Iterator[int]:
    """A port of this host that accepts connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted: list[socket.socket] = []
        thread = start(lambda: [accepted.append(listener.accept()[0]) for _ in range(1000)])
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for each in accepted:
                each.close()
            thread.join(5)


@contextmanager
def full_server() -> Iterator[int]:
    """A port of this host whose queue is full: a client that connects waits."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@contextmanager
def slow_server() -> Iterator[int]:
    """An HTTP server that sends the head of an answer and keeps its body until the end of the block."""
    stop = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            self.wfile.write(b"a little")
            self.wfile.flush()
            stop.wait(PATIENCE_S)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = start(server.serve_forever)
    try:
        yield server.server_address[1]
    finally:
        stop.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
