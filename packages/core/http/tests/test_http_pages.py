"""Pages for GET and HEAD, from a thread; addresses; and as many descriptors as the machine gives."""

import http.client
import resource
import subprocess
import sys
import threading
from http import HTTPStatus

import pytest

from offbeat_http import Page, PageServer, address_of, is_loopback, listen


async def answer(path, headers):
    if path == "/none":
        return Page.refuse(HTTPStatus.NOT_FOUND, "there is nothing")
    return Page(body=b"a" * 1_000_000, headers={"X-Host": headers["host"]})


@pytest.fixture
def server():
    with PageServer(listen("127.0.0.1", 0), answer, name="pages") as server:
        yield server
    assert "pages" not in {thread.name for thread in threading.enumerate()}


def ask(server, method, path="/"):
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.request(method, path, headers={"Host": "of.mine"})
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


def test_get_and_head_say_the_same_and_only_get_has_a_body(server):
    got, headed = ask(server, "GET"), ask(server, "HEAD")
    assert [got[0], headed[0]] == [200, 200]
    assert [answer[1]["Content-Length"] for answer in (got, headed)] == ["1000000"] * 2
    assert got[1]["X-Host"] == "of.mine"
    assert (len(got[2]), headed[2]) == (1_000_000, b"")
    assert ask(server, "HEAD", "/none")[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_else_is_answered(server, method):
    status, headers, _ = ask(server, method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_a_closed_server_listens_no_more():
    with PageServer(listen("127.0.0.1", 0), answer, name="pages") as server:
        pass
    with pytest.raises(OSError):
        ask(server, "GET")


def test_addresses_are_urls_in_both_families():
    with listen("127.0.0.1", 0) as four, listen("[::1]", 0) as six:
        assert address_of(four) == f"http://127.0.0.1:{four.getsockname()[1]}"
        assert address_of(six) == f"http://[::1]:{six.getsockname()[1]}"


@pytest.mark.parametrize(
    ("host", "is_own"),
    [("127.0.0.2", True), ("::1", True), ("[::1]", True), ("LOCALHOST", True), ("0.0.0.0", False), ("a.b", False)],
)
def test_loopback_is_known_by_name_and_number(host, is_own):
    assert is_loopback(host) is is_own


def test_a_process_gets_the_descriptors_that_it_may_have():
    code = (
        "import resource\nfrom offbeat_http import raise_descriptor_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 900))\nraise_descriptor_limit()\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 900
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["900", "900"]
