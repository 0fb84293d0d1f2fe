"""A thread that waits for the other side of a connection is reported with the address of that side."""

import http.client
import os
import select
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from liveness_standing import full_server, silent_server, slow_server, standing, start, until, wait_of

from offbeat_liveness._process.outside import file_locks, system_calls

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel by /proc")


@pytest.fixture
def silent() -> Iterator[str]:
    with silent_server() as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def slow() -> Iterator[str]:
    with slow_server() as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def full() -> Iterator[str]:
    with full_server() as port:
        yield f"127.0.0.1:{port}"


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_http_client_is_reported_with_host_and_timeout(silent: str) -> None:
    def ask() -> None:
        connection = http.client.HTTPConnection("localhost", port_of(silent), timeout=30)
        connection.request("GET", "/")
        connection.getresponse()

    wait = standing(ask, "an HTTP answer from")
    assert wait.kind == "http"
    assert wait.address == f"localhost:{port_of(silent)}"
    assert wait.timeout_s == 30
    assert wait.text == f"an HTTP answer from localhost:{port_of(silent)} (http.client, timeout 30 s)"


def test_the_rest_of_an_answer_is_an_answer(slow: str) -> None:
    def ask() -> None:
        connection = http.client.HTTPConnection(slow)
        connection.request("GET", "/")
        connection.getresponse().read()

    wait = standing(ask, "an HTTP answer from")
    assert (wait.kind, wait.address, wait.timeout_s) == ("http", slow, None)


def test_urllib(silent: str) -> None:
    wait = standing(lambda: urllib.request.urlopen(f"http://{silent}/", timeout=20), "(urllib")
    assert (wait.kind, wait.address, wait.timeout_s) == ("http", silent, 20)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_requests(silent: str, scheme: str) -> None:
    requests = pytest.importorskip("requests")
    wait = standing(lambda: requests.get(f"{scheme}://{silent}/", timeout=30), "(requests")
    assert (wait.kind, wait.address, wait.timeout_s) == ("http", silent, 30)
    doing = "an HTTP answer from" if scheme == "http" else "a TLS handshake with"
    assert until(lambda: standing(lambda: requests.get(f"{scheme}://{silent}/", timeout=30), doing))


def test_urllib3_without_a_timeout_may_wait_for_ever(silent: str) -> None:
    urllib3 = pytest.importorskip("urllib3")
    wait = standing(lambda: urllib3.PoolManager().request("GET", f"http://{silent}/"), "(urllib3")
    assert (wait.kind, wait.address, wait.timeout_s) == ("http", silent, None)


def test_requests_that_do_not_get_a_connection(full: str) -> None:
    requests = pytest.importorskip("requests")
    wait = standing(lambda: requests.get(f"http://{full}/", timeout=25), "a connection to")
    assert (wait.kind, wait.address, wait.timeout_s) == ("http", full, 25)


def test_httpx(silent: str, slow: str, full: str) -> None:
    httpx = pytest.importorskip("httpx")
    for address, doing in ((silent, "an HTTP answer"), (slow, "an HTTP answer"), (full, "a connection to")):
        wait = standing(lambda address=address: httpx.get(f"http://{address}/", timeout=30), doing)
        assert (wait.kind, wait.address, wait.timeout_s) == ("http", address, 30)
        assert "(httpx" in wait.text


def test_httpx_that_has_no_connection_left(silent: str) -> None:
    httpx = pytest.importorskip("httpx")
    client = httpx.Client(limits=httpx.Limits(max_connections=1), timeout=30)
    first = start(lambda: client.get(f"http://{silent}/"))
    until(lambda: (wait := wait_of(first)) is not None and "an HTTP answer" in wait.text)
    wait = standing(lambda: client.get(f"http://{silent}/"), "a free connection of the pool to")
    assert (wait.kind, wait.address) == ("http", silent)


def test_openai_is_reported_by_its_name(silent: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(api_key="none", base_url=f"http://{silent}/", max_retries=0)
    wait = standing(lambda: client.chat.completions.create(model="m", messages=[]), "(openai")
    assert (wait.kind, wait.address) == ("http", silent)


def test_files_over_sockets_and_connections(silent: str, full: str) -> None:
    def read() -> None:
        with socket.create_connection(("127.0.0.1", port_of(silent))) as connection:
            connection.makefile("rb").readline()

    wait = standing(read, "data from")
    assert (wait.kind, wait.address) == ("socket", silent)
    wait = standing(lambda: socket.create_connection(("127.0.0.1", port_of(full)), timeout=9), "a connection to")
    assert (wait.kind, wait.address, wait.timeout_s) == ("socket", full, 9)


def test_accept_is_reported_with_the_own_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        wait = standing(listener.accept, "somebody who connects")
        assert (wait.kind, wait.address) == ("socket", f"127.0.0.1:{listener.getsockname()[1]}")
        listener.shutdown(socket.SHUT_RDWR)


@on_linux
@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_call_of_c_in_the_users_own_frame(silent: str, timeout: float | None) -> None:
    """There is no frame below the user's; the kernel knows the descriptor."""
    with socket.create_connection(("127.0.0.1", port_of(silent))) as connection:
        connection.settimeout(timeout)
        wait = standing(lambda: connection.recv(10), "a socket to")
        assert (wait.kind, wait.address) == ("socket", silent)
        connection.shutdown(socket.SHUT_RDWR)


@on_linux
def test_a_send_that_no_process_reads(silent: str) -> None:
    with socket.create_connection(("127.0.0.1", port_of(silent))) as connection:
        wait = standing(lambda: connection.sendall(bytes(100_000_000)), "room to send to")
        assert (wait.kind, wait.address) == ("socket", silent)
        connection.shutdown(socket.SHUT_RDWR)


@on_linux
@pytest.mark.parametrize("how", ["select", "epoll", "poll"])
def test_waits_for_several(silent: str, how: str) -> None:
    with socket.create_connection(("127.0.0.1", port_of(silent))) as connection:

        def watch() -> None:
            if how == "select":
                select.select([connection], [], [], 20)
                return
            poll = select.poll() if how == "poll" else select.epoll()
            poll.register(connection.fileno(), select.POLLIN)
            poll.poll(20_000 if how == "poll" else 20)

        assert standing(watch, "a socket to").address == silent
        connection.shutdown(socket.SHUT_RDWR)


@on_linux
def test_pipes_name_the_child_at_the_other_end() -> None:
    reader, writer = os.pipe()
    go = threading.Event()
    thread = start(lambda: go.wait(30) and os.read(reader, 1))
    child = os.fork()
    if child == 0:
        os.close(reader)
        threading.Event().wait(60)
        os._exit(0)
    try:
        go.set()
        wait = until(lambda: (found := wait_of(thread)) and found.text.startswith("data from a pipe") and found)
        assert (wait.kind, wait.pid) == ("process", child)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.write(writer, b"x")
        thread.join(10)
        os.close(reader)
        os.close(writer)


@on_linux
def test_files_are_reported_with_their_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_locks, "LOCAL", frozenset())  # a pipe stands for a server that does not answer
    fifo = tmp_path / "with space"
    os.mkfifo(fifo)
    wait = standing(lambda: fifo.open("rb").read(1), "to open or look at it")
    assert (wait.kind, wait.on) == ("file", str(fifo))
    assert f"({system_calls.file_system(str(fifo))})" in wait.text
    with fifo.open("wb"):
        pass


@on_linux
def test_a_lock_of_a_file_that_another_has(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    name = tmp_path / "checkpoint.lock"
    with name.open("w") as first, name.open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        wait = standing(lambda: fcntl.flock(second, fcntl.LOCK_EX), "a lock of")
        assert (wait.kind, wait.on, wait.pid) == ("lock", str(name), 0)
        kind = system_calls.file_system(str(name))
        assert wait.text == f"a lock of {name} ({kind}), held by this process itself"
        fcntl.flock(first, fcntl.LOCK_UN)


@on_linux
def test_the_descriptor_and_the_path_name_one_file_system(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        found = system_calls.descriptor_of(file.fileno())
    assert found is not None
    assert found.file_system == system_calls.file_system(str(tmp_path / "file")) != ""


def test_addresses_of_either_family() -> None:
    assert system_calls._address("0100007F:1F40") == "127.0.0.1:8000"
    assert system_calls._address("00000000000000000000000001000000:1F40") == "[::1]:8000"
    assert system_calls._address("0000000000000000FFFF00000100007F:1F40") == "127.0.0.1:8000"
