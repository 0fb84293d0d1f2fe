"""Unknown clients get nowhere: no secret on the wire, no message accepted twice, no memory, no thread for them."""

import contextlib
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat_liveness._network import side_channel
from offbeat_liveness._network.side_channel import (
    HEADER_BYTES,
    HELLO_BYTES,
    MAX_BODY_BYTES,
    MAX_UNPROVEN,
    Address,
    Listener,
    Message,
    RefusedError,
    ask,
    ask_all,
    encode,
    hello,
    open_question,
    read_hello,
)

LIMIT_S = 20.0
SECRET = "a secret of the run"


def address_of(host: str, port: int) -> Address:
    return Address(host=host, port=port, machine="vm", pid=1, born=0, name="rank 0")


class Counted:
    def __init__(self) -> None:
        self.num_answers = 0  # one of the threads may overwrite another's count: no test counts many
        self.listener = Listener("127.0.0.1", lambda: SECRET, self._answer)
        self.address = address_of(self.listener.host, self.listener.port)

    def _answer(self, message: Message) -> Message:
        self.num_answers += 1
        return {"received": message["ask"]}

    def ping(self, secret: str = SECRET) -> Message | None:
        return ask(self.address, {"ask": "ping"}, secret, LIMIT_S)

    def connect(self) -> socket.socket:
        return socket.create_connection((self.listener.host, self.listener.port), timeout=LIMIT_S)


@pytest.fixture
def counted() -> Iterator[Counted]:
    found = Counted()
    yield found
    found.listener.close()


def num_own_threads() -> int:
    return sum(each.name.startswith("offbeat-liveness-answer") for each in threading.enumerate())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_many_unknown_clients_that_drip_bytes_cost_no_thread_and_no_memory(counted: Counted) -> None:
    before = resident_bytes()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(counted.connect()) for _ in range(200)]
        for each in clients:
            with contextlib.suppress(OSError):
                each.sendall(b"x" * (HEADER_BYTES - 1))  # never the whole header
        assert counted.ping() == {"received": "ping"}, "those of the run are answered meanwhile"
        assert len(counted.listener._pending) <= MAX_UNPROVEN
        assert num_own_threads() <= 1, "that of the answer may be about to end"
        assert resident_bytes() - before < 32 << 20
    assert counted.num_answers == 1


def test_a_client_that_sends_without_end_is_cut_off_at_the_header(counted: Counted) -> None:
    with counted.connect() as client, contextlib.suppress(ConnectionError):
        for _ in range(1000):
            client.sendall(bytes(1 << 16))
        pytest.fail("62 MiB were taken from an unknown client")
    assert counted.num_answers == 0


def test_a_client_that_sends_nothing_is_disconnected(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_channel, "UNPROVEN_S", 0.2)
    with counted.connect() as client:
        assert len(client.recv(HELLO_BYTES)) == HELLO_BYTES
        assert client.recv(1) == b"", "closed by the listener"


def test_a_client_that_drips_the_body_is_cut_off(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_channel, "EXCHANGE_S", 0.3)
    question = side_channel.Question(encode({"ask": "ping", "x": "y" * 1000}), SECRET)
    with counted.connect() as insider:
        sent = question.to_send(insider.recv(HELLO_BYTES)[-16:])
        insider.sendall(sent[: HEADER_BYTES + 5])
        end_s, is_cut = time.monotonic() + LIMIT_S, False
        while not is_cut and time.monotonic() < end_s:
            try:
                insider.settimeout(0.05)
                is_cut = insider.recv(1) == b""
            except TimeoutError:
                insider.sendall(b"y")
            except OSError:
                is_cut = True
        assert is_cut
    assert counted.num_answers == 0


def test_a_wrong_secret_is_not_answered(counted: Counted) -> None:
    assert counted.ping("a guess") is None
    assert counted.ping("") is None
    assert counted.num_answers == 0


@contextlib.contextmanager
def recording(door: Address) -> Iterator[tuple[Address, list[bytes], list[bytes]]]:
    """A process between two others that records what goes either way."""
    server = socket.create_server(("127.0.0.1", 0))
    said: list[bytes] = []
    answered: list[bytes] = []

    def pass_on() -> None:
        inner, _ = server.accept()
        with inner, socket.create_connection((door.host, door.port), timeout=LIMIT_S) as outer:

            def back() -> None:
                while part := outer.recv(1 << 16):
                    answered.append(part)
                    inner.sendall(part)
                inner.shutdown(socket.SHUT_WR)

            thread = threading.Thread(target=back)
            thread.start()
            with contextlib.suppress(OSError):
                while part := inner.recv(1 << 16):
                    said.append(part)
                    outer.sendall(part)
            thread.join()

    thread = threading.Thread(target=pass_on)
    thread.start()
    try:
        yield address_of("127.0.0.1", server.getsockname()[1]), said, answered
    finally:
        thread.join(LIMIT_S)
        server.close()


def test_a_recorded_exchange_cannot_be_said_again_and_holds_no_secret(counted: Counted) -> None:
    with recording(counted.address) as (between, said, answered):
        assert ask(between, {"ask": "ping"}, SECRET, LIMIT_S) == {"received": "ping"}
    assert SECRET.encode() not in b"".join([*said, *answered])
    with counted.connect() as again:
        again.recv(HELLO_BYTES)
        with contextlib.suppress(OSError):
            again.sendall(b"".join(said))
            assert again.recv(1) == b""
    assert counted.num_answers == 1
    with socket.create_server(("127.0.0.1", 0)) as server:  # and its answer answers no other question

        def replay() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"".join(answered)[:HELLO_BYTES])
                connection.recv(1 << 16)
                connection.sendall(b"".join(answered)[HELLO_BYTES:])

        thread = threading.Thread(target=replay)
        thread.start()
        assert ask(address_of("127.0.0.1", server.getsockname()[1]), {"ask": "ping"}, SECRET, LIMIT_S) is None
        thread.join(LIMIT_S)


def test_an_unknown_process_that_listens_feeds_no_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        body = json.dumps({"addresses": []}).encode()

        def lie() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                greeting = hello()
                connection.sendall(greeting)
                header = connection.recv(HEADER_BYTES)
                with contextlib.suppress(RefusedError):
                    open_question(header, read_hello(greeting), "a guess")
                connection.sendall(len(body).to_bytes(4, "big") + bytes(64) + body)

        thread = threading.Thread(target=lie)
        thread.start()
        assert ask(address_of("127.0.0.1", server.getsockname()[1]), {"ask": "meet"}, SECRET, LIMIT_S) is None
        thread.join(LIMIT_S)


def test_a_body_that_is_too_long_is_refused_before_it_is_read(counted: Counted) -> None:
    assert ask(counted.address, {"ask": "x" * (MAX_BODY_BYTES + 1)}, SECRET, LIMIT_S) is None
    assert counted.num_answers == 0


def test_a_thousand_clients_at_once_are_all_answered(counted: Counted) -> None:
    replies = ask_all(dict.fromkeys(range(1000), counted.address), {"ask": "ping"}, SECRET, LIMIT_S)
    assert len(replies) == 1000
    end_s = time.monotonic() + LIMIT_S
    while num_own_threads() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert num_own_threads() == 0


def test_without_a_secret_no_client_is_answered() -> None:
    with contextlib.closing(Listener("127.0.0.1", lambda: "", lambda message: message)) as listener:
        assert ask(address_of(listener.host, listener.port), {"ask": "ping"}, "", 2.0) is None


@pytest.mark.nightly
def test_all_are_asked_at_once_and_the_silent_are_left_out(counted: Counted) -> None:
    closed = Listener("127.0.0.1", lambda: SECRET, lambda message: message)
    closed.close()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts in the kernel, as a stopped process does
        doors = {**dict.fromkeys(range(20), counted.address), 20: address_of(closed.host, closed.port)}
        doors[99] = address_of("127.0.0.1", silent.getsockname()[1])
        replies = ask_all(doors, {"ask": "ping", "padding": "x" * 200_000}, SECRET, 4.0)
    assert set(replies) == set(range(20))


def test_more_are_asked_than_there_are_descriptors(counted: Counted) -> None:
    code = (
        "import resource, sys\n"
        "from offbeat_liveness._network.side_channel import Address, ask_all\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))\n"
        "one = Address(host='127.0.0.1', port=int(sys.argv[1]), machine='vm', pid=1, born=0, name='rank 0')\n"
        "print(len(ask_all(dict.fromkeys(range(100), one), {'ask': 'ping'}, sys.argv[2], 20.0)))\n"
    )
    command = [sys.executable, "-c", code, str(counted.listener.port), SECRET]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"100\n"


def test_a_listener_outlives_a_lack_of_descriptors(counted: Counted) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as client:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, hard))
            client.connect((counted.listener.host, counted.listener.port))
            time.sleep(0.3)  # for the listener to try, and fail
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert counted.ping() == {"received": "ping"}


NO_SECRET = '{"ask": "ping", "secret": "é"}\n'.encode()
DEEP = b"[" * 200_000 + b"\n"


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_garbage_does_not_end_the_listener(counted: Counted) -> None:
    for garbage in (b"", b"\n", b"{not json\n", b"[1]\n", b"\xff\xfe\n", NO_SECRET, DEEP):
        with counted.connect() as client:
            client.sendall(garbage)
    assert counted.ping() == {"received": "ping"}
