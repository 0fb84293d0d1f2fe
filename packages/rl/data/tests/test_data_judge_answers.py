"""What a judge's endpoint may answer, by mistake or on purpose: an error of that completion, bounded, and in time."""

import asyncio
import gzip
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from offbeat_core import ConfigError
from offbeat_data import CompletionText, Prompt, RewardConfig, RewardError, RewardScore, build_reward

PROMPT = Prompt(index=7, ids=np.array([1], np.int32), text="?", answer="12", fields={"prompt": "?"})
Send = Callable[[socket.socket], None]
OK = b"HTTP/1.1 200 OK\r\n"
MEBIBYTE = 1 << 20


class RawEndpoint:
    """Answers each connection by `send`, once it has read a request."""

    def __init__(self) -> None:
        self.send: Send = lambda connection: None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=[connection], daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                read_request(connection)
                self.send(connection)
            except OSError:  # the client has read enough
                pass

    def close(self) -> None:
        self._listener.close()


def read_request(connection: socket.socket) -> None:
    """Read all of it: a socket that is closed with bytes unread resets the connection, and its answer is lost."""
    with connection.makefile("rb") as request:
        length = 0
        for line in request:
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
            if line == b"\r\n":
                break
        request.read(length)


@pytest.fixture
def endpoint() -> Iterator[RawEndpoint]:
    made = RawEndpoint()
    yield made
    made.close()


def ask(endpoint: RawEndpoint, timeout_s: float = 20.0, **options: object) -> RewardScore:
    judge = {"url": endpoint.url, "model": "judge", "backoff_s": 0.01, "max_retries": 0, **options}
    reward = build_reward(RewardConfig(name="judge", judge=judge, timeout_s=timeout_s))
    [score] = asyncio.run(reward.await_group(PROMPT, [CompletionText(text="12")], ["judge"], timeout_s))
    return score


def whole(content: bytes, *headers: bytes) -> Send:
    head = b"".join(line + b"\r\n" for line in (b"Content-Length: %d" % len(content), *headers))
    return lambda connection: connection.sendall(OK + head + b"\r\n" + content)


def said(text: object, **others: object) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}], **others}).encode()


def endless(connection: socket.socket) -> None:
    connection.sendall(OK + b"Transfer-Encoding: chunked\r\n\r\n")
    while True:
        connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")


def large(connection: socket.socket) -> None:
    connection.sendall(OK + b"Content-Length: %d\r\n\r\n" % (100 * MEBIBYTE))
    for _ in range(100):
        connection.sendall(b" " * MEBIBYTE)


def trickling(connection: socket.socket) -> None:
    connection.sendall(OK + b"Content-Length: 1000\r\n\r\n")
    while True:
        connection.sendall(b" ")
        time.sleep(0.05)


PACKED = gzip.compress(b" " * 64 * MEBIBYTE)


@pytest.mark.parametrize(
    ("send", "message"),
    [
        pytest.param(large, "more than 4194304 bytes", id="100 MiB"),
        pytest.param(endless, "more than 4194304 bytes", id="without an end"),
        pytest.param(whole(PACKED, b"Content-Encoding: gzip"), "more than 4194304 bytes", id="a bomb"),
        pytest.param(whole(b"no gzip", b"Content-Encoding: gzip"), "packs its answer", id="packed wrongly"),
        pytest.param(whole(b"?", b"Content-Encoding: zstd"), "packs its answer", id="packed in another way"),
        pytest.param(whole(b"[" * 100_000), "no chat completion", id="deep"),
        pytest.param(whole(said(["Score: 7"])), "no chat completion", id="a list"),
        pytest.param(whole(said(7)), "no chat completion", id="a number"),
        pytest.param(whole(said("Score: 7", usage="none")), "no chat completion", id="usage of another kind"),
        pytest.param(whole(b"[]"), "no chat completion", id="another form"),
        pytest.param(whole(b"\xff\xfe"), "no chat completion", id="no text"),
        pytest.param(whole(b""), "no chat completion", id="nothing"),
        pytest.param(lambda connection: connection.sendall(b"\0" * 1000), "did not answer", id="no HTTP"),
    ],
)
def test_what_is_no_answer_is_an_error_of_that_completion(endpoint: RawEndpoint, send: Send, message: str) -> None:
    endpoint.send = send
    tracemalloc.start()
    try:
        with pytest.raises(RewardError, match=message):
            ask(endpoint)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 32 * MEBIBYTE


def test_an_answer_that_comes_byte_by_byte_has_the_time_of_one(endpoint: RawEndpoint) -> None:
    endpoint.send = trickling
    start_s = time.monotonic()
    with pytest.raises(RewardError, match=r"no whole answer within 0\.5 s"):
        ask(endpoint, request_timeout_s=0.5)
    assert time.monotonic() - start_s < 10


def test_a_redirect_is_not_followed(endpoint: RawEndpoint) -> None:
    endpoint.send = lambda connection: connection.sendall(
        f"HTTP/1.1 302 Found\r\nLocation: {endpoint.url}\r\nContent-Length: 0\r\n\r\n".encode()
    )
    with pytest.raises(RewardError, match="refuses: status 302"):
        ask(endpoint, max_retries=5)


@pytest.mark.parametrize("count", ["many", -1, 1e300, [3], None, {}])
def test_a_count_of_tokens_that_is_none_costs_no_reply(endpoint: RawEndpoint, count: object) -> None:
    endpoint.send = whole(said("Score: 7", usage={"prompt_tokens": count, "completion_tokens": 5}))
    score = ask(endpoint)
    assert score.value == pytest.approx(0.7)
    assert (score.costs["judge/prompt_tokens"], score.costs["judge/completion_tokens"]) == (0, 5)


def test_a_packed_answer_of_a_proxy_is_read(endpoint: RawEndpoint) -> None:
    endpoint.send = whole(gzip.compress(said("Score: 7")), b"Content-Encoding: gzip")
    assert ask(endpoint).value == pytest.approx(0.7)


def test_a_long_reply_without_a_score_is_searched_in_time_that_grows_with_its_length(endpoint: RawEndpoint) -> None:
    endpoint.send = whole(said("Score: " + " " * MEBIBYTE + "*" * MEBIBYTE))
    with pytest.raises(RewardError, match="holds no score"):
        ask(endpoint, timeout_s=60.0)


@pytest.mark.parametrize("host", ["127.0.0.1.example.com", "127.example.com", "0.0.0.0", "localhost.example.com"])
def test_a_name_that_looks_like_this_machine_gets_nothing_in_clear(host: str) -> None:
    with pytest.raises(ConfigError, match="must be https"):
        build_reward(RewardConfig(name="judge", judge={"url": f"http://{host}/v1", "model": "judge"}))
