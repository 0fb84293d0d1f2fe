"""Connections that ask for nothing: few of them, not for long, without a thread, and with one line in the log."""

import asyncio
import contextlib
import logging
import re
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import pytest

from offbeat_http import ConnectionLimits, HttpServer, _admission, listen

pytestmark = pytest.mark.asyncio
DEADLINE_S = 60.0
HALF = b"GET / HTTP/1.1\r\nHost: x\r\n"
WHOLE = HALF + b"\r\n"


class Application:
    """Answers `size` bytes, once it may."""

    def __init__(self, size=2, status=200):
        self.may_answer, self.size, self.status, self.num_asked = asyncio.Event(), size, status, 0
        self.may_answer.set()

    async def __call__(self, scope, receive, send):
        self.num_asked += 1
        await self.may_answer.wait()
        length = str(self.size).encode()
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": b"a" * self.size})


@asynccontextmanager
async def serving(application=None, **limits):
    application = application or Application()
    server = HttpServer(application, listen("127.0.0.1", 0), limits=ConnectionLimits(**limits), close_deadline_s=5.0)
    await server.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield server, application
    finally:
        await server.close()


class Client:
    def __init__(self, server):
        self.port = int(server.url.rpartition(":")[2])

    async def open(self, data=b""):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writer.write(data)
        return self

    async def ask(self):
        self.writer.write(WHOLE)
        return await self.answer()

    async def answer(self):
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
        await self.reader.readexactly(length)
        return int(head.split()[1])

    async def ended(self):
        """Wait until the server has closed it."""
        with contextlib.suppress(ConnectionError):
            await self.reader.read()
        self.writer.close()

    @property
    def is_open(self):
        return not self.reader.at_eof() and self.reader.exception() is None


async def test_the_oldest_of_too_many_pending_connections_is_closed_and_a_client_is_answered():
    async with serving(max_pending=16, head_deadline_s=DEADLINE_S) as (server, _):
        pending = [await Client(server).open(HALF) for _ in range(100)]
        assert await (await Client(server).open()).ask() == 200
        for client in pending[:85]:
            await client.ended()
        assert [client.is_open for client in pending[85:]] == [True] * 15


@pytest.mark.skipif(not hasattr(socket, "TCP_DEFER_ACCEPT"), reason="the kernel keeps no connection that is silent")
async def test_connections_without_a_byte_stay_in_the_kernel_and_end_none():
    took_s = DEADLINE_S
    while took_s > 1.5:  # they stay there for 2 s, so a machine that is slower tries again
        began_s = time.monotonic()
        async with serving(max_pending=4, head_deadline_s=0.1) as (server, _):
            pending = [await Client(server).open() for _ in range(20)]
            assert await (await Client(server).open()).ask() == 200
            are_open = [client.is_open for client in pending]
            took_s = time.monotonic() - began_s
            for client in pending:
                await client.ended()
    assert are_open == [True] * 20


async def test_of_many_that_connect_at_once_none_is_ended_for_another_before_its_moment_is_over(monkeypatch):
    monkeypatch.setattr(_admission, "CROWDED_S", DEADLINE_S)
    async with serving(max_pending=16, head_deadline_s=DEADLINE_S) as (server, _):
        clients = [await Client(server).open(HALF) for _ in range(20)]
        await asyncio.sleep(0.2)
        for client in clients:
            client.writer.write(b"\r\n")
        assert [await client.answer() for client in clients] == [200] * 20


async def test_two_hundred_clients_at_once_are_all_answered():
    async with serving() as (server, application):
        application.may_answer.clear()
        clients = [asyncio.create_task(Client(server).open(WHOLE)) for _ in range(200)]
        opened = [await client for client in clients]
        while application.num_asked < 200:
            await asyncio.sleep(0.01)
        application.may_answer.set()
        assert [await client.answer() for client in opened] == [200] * 200


async def test_half_a_head_has_a_deadline_whichever_head_it_is():
    async with serving(head_deadline_s=1.0, idle_s=60) as (server, _):
        first, second = await Client(server).open(HALF), await Client(server).open()
        assert await second.ask() == 200
        await asyncio.sleep(2.0)  # between two requests it may rest
        assert await second.ask() == 200
        second.writer.write(HALF)
        await first.ended()
        await second.ended()


async def test_one_that_rests_makes_room_and_one_that_is_answered_does_not():
    async with serving(max_connections=3, idle_s=60) as (server, application):
        clients = [await Client(server).open() for _ in range(3)]
        assert [await client.ask() for client in clients] == [200] * 3
        application.may_answer.clear()
        clients[0].writer.write(WHOLE)
        while application.num_asked < 4:
            await asyncio.sleep(0.01)
        others = [await Client(server).open(WHOLE) for _ in range(3)]  # the kernel keeps the third
        await clients[1].ended()
        await clients[2].ended()
        while application.num_asked < 6:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert application.num_asked == 6
        application.may_answer.set()
        assert [await client.answer() for client in (clients[0], *others)] == [200] * 4


async def test_a_body_that_is_not_wanted_does_not_keep_a_connection():
    async with serving(idle_s=60) as (server, _):
        client = await Client(server).open(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert await client.answer() == 200
        await client.ended()


async def test_a_refused_client_stays_pending_and_gets_the_reason_while_it_sends():
    async with serving(Application(status=401), idle_s=60, head_deadline_s=DEADLINE_S) as (server, application):
        asked = await Client(server).open()
        assert await asked.ask() == 401
        await asked.ended()
        sending = await Client(server).open(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n")
        for _ in range(20):
            sending.writer.write(b"a" * 1_000_000)
            await asyncio.sleep(0.01)
        assert await sending.answer() == 401
        sending.writer.close()
        again = await Client(server).open(WHOLE * 3)
        assert await again.answer() == 401
        await again.ended()
        assert application.num_asked == 3


async def test_a_client_that_reads_nothing_is_let_go():
    size = 30_000_000
    async with serving(Application(size), send_deadline_s=0.3) as (server, _):
        client = await Client(server).open(WHOLE)
        await client.reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(2.0)  # a reader takes 128 kB by itself, and no more
        num_bytes = 0
        with contextlib.suppress(ConnectionError):
            while part := await client.reader.read(1 << 20):
                num_bytes += len(part)
        client.writer.close()
    assert num_bytes < size


async def test_a_thousand_malformed_requests_are_one_line(caplog):
    caplog.set_level(logging.DEBUG)
    late = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n"
    async with serving() as (server, _):
        for number in range(400):
            kind = (b"no request\r\n\r\n", b"GET / HTTP/1.1\r\nA: " + b"a" * 70_000, late)[number % 3]
            client = await Client(server).open(kind)
            await client.ended()
    lines = [record for record in caplog.records if record.name.startswith(("offbeat", "uvicorn"))]
    lines = [record for record in lines if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in lines] == ["HTTP connections in the last 60 s: 400 malformed requests"]
    assert not [record for record in caplog.records if record.name == "asyncio" and record.levelno > logging.DEBUG]


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
END = b"0\r\n\r\n"


def chunks(size, count):
    return b"%x\r\n%s\r\n" % (size, b"a" * size) * count


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(CHUNKED + b"\r\n" + chunks(1, 300) + END, id="single bytes"),
        pytest.param(CHUNKED + b"\r\n" + chunks(1000, 10) + chunks(1, 1000) + END, id="single bytes later"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * 128 + b"\r\n", id="lines of head"),
        pytest.param(b"GET / HTTP/1.1\nHost: x\n" + b"a:b\n" * 128 + b"\n", id="lines of head without CR"),
        pytest.param(HALF + b"a:b\r\n" * 128, id="lines of half a head"),
        pytest.param(CHUNKED + b"Content-Length: 5\r\n\r\n" + END, id="both lengths"),
        pytest.param(WHOLE + HALF + b"a:b\r\n" * 128 + b"\r\n", id="the second of two"),
    ],
)
async def test_a_request_of_more_parts_than_any_client_sends_is_refused(request_bytes):
    async with serving(Application(status=204, size=0)) as (server, _):
        client = await Client(server).open(request_bytes)
        answers = await client.reader.read()
        client.writer.close()
    assert answers.count(b" 400 ") == 1


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(CHUNKED + b"\r\n" + chunks(1, 256) + END, id="a few single bytes"),
        pytest.param(CHUNKED + b"\r\n" + chunks(128, 2000) + END, id="many chunks"),
        pytest.param(CHUNKED + b"\r\n" + b"10;name=value\r\n" + b"a" * 16 + b"\r\n" + END, id="chunk extensions"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * 100 + b"\r\n", id="a hundred headers"),
        pytest.param(
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n" + b"\n" * 5000, id="a body of lines"
        ),
    ],
)
async def test_what_clients_send_is_not_taken_for_an_attack(request_bytes):
    class Reading(Application):
        async def __call__(self, scope, receive, send):
            while (await receive()).get("more_body"):
                pass
            await super().__call__(scope, receive, send)

    async with serving(Reading()) as (server, _):
        client = await Client(server).open(request_bytes)
        assert await client.answer() == 200
        assert await client.ask() == 200


async def test_an_upgrade_is_no_line(caplog):
    async with serving() as (server, _):
        client = await Client(server).open(HALF + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert await client.answer() == 200
    assert caplog.text == ""


NO_DESCRIPTOR = """
import logging, os, resource, sys, time
from offbeat_http import Page, PageServer, listen

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
logging.basicConfig(stream=sys.stdout, format="log: %(message)s")
taken = []

async def answer(path, headers):
    try:
        while path == "/take":
            taken.append(os.dup(0))
    except OSError:
        pass
    return Page(body=b"here")

with PageServer(listen("127.0.0.1", 0), answer, name="pages") as server:
    print(server.url, flush=True)
    sys.stdin.readline()
    began_s = time.process_time()
    sys.stdin.readline()
    print(f"spent: {time.process_time() - began_s:.3f}", flush=True)
    for number in taken:
        os.close(number)
    sys.stdin.readline()
"""


def send(port, path):
    client = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return client


def read(client):
    with client:
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


async def test_without_a_descriptor_accepting_waits_and_does_not_spin():
    command = [sys.executable, "-c", NO_DESCRIPTOR]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        port = int(process.stdout.readline().rpartition(":")[2])
        assert read(send(port, "/take")).endswith(b"here")
        clients = [send(port, "/") for _ in range(5)]  # now there is none
        process.stdin.write("\n")
        process.stdin.flush()
        began_s = time.monotonic()
        time.sleep(2.0)
        process.stdin.write("\n")
        process.stdin.flush()
        spent_s = float(process.stdout.readline().removeprefix("spent: "))
        assert [read(client).endswith(b"here") for client in clients] == [True] * 5
        paused_s = time.monotonic() - began_s
        output, _ = process.communicate("\n", timeout=DEADLINE_S)
    assert spent_s < 0.5
    [line] = output.splitlines()
    # Counted too: where other processes have the CPUs, one that spins spends little time.
    num_pauses = int(re.search(r"(\d+) pauses", line)[1])
    assert num_pauses <= 1 + paused_s / _admission.LACK_S
    assert "pauses because no connection could be accepted, as for lack of a descriptor" in line
