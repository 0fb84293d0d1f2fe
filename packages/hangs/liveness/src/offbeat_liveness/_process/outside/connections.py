"""Waits for the other side of a connection: HTTP clients, bare sockets, TLS, multiprocessing's connections."""

import _socket
import dataclasses
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from offbeat_liveness._process.outside import peek, system_calls
from offbeat_liveness._process.outside.children import troubled_children
from offbeat_liveness._process.outside.peek import Look, Rule, seconds, timed_wait
from offbeat_liveness._process.snapshot import OutsideWait

CLIENTS: Final = {
    "/http/client.py": "http.client",
    "/urllib/request.py": "urllib",
    "/urllib3/": "urllib3",
    "/requests/": "requests",
    "/httpcore": "httpcore",
    "/httpx": "httpx",
    "/aiohttp/": "aiohttp",
    "/huggingface_hub/": "huggingface_hub",
    "/openai/": "openai",
    "/anthropic/": "anthropic",
}
CLIENT_DEPTH: Final = 24


def http_answer(host: str, timeout: object, client: str, *, doing: str = "an HTTP answer from") -> OutsideWait:
    """Return a wait of the HTTP library `client` for "host:port", with the timeout of the call in seconds."""
    text = f"{doing} {host or 'an unknown host'} ({client}{seconds(timeout)})"
    return OutsideWait(kind="http", text=text, address=host, timeout_s=peek.number(timeout))


def host_and_port(host: object, port: object) -> str:
    name, number = peek.text(host), peek.integer(port)
    return "" if not name else system_calls.join_host_port(name, number) if number is not None else name


def client_of(names: list[str]) -> str:
    """Return the outermost HTTP library among the files of a stack, innermost first."""
    found = "http"
    for name in names[:CLIENT_DEPTH]:
        found = next((client for part, client in CLIENTS.items() if part in name), found)
    return found


def peer_of(connection: object) -> str:
    return _name_of(connection, _socket.socket.getpeername)


def _name_of(connection: object, ask: Callable[[Any], Any]) -> str:
    """Return the name of one side of a socket, asked by C of its own class; "" where it has none."""
    if not issubclass(type(connection), _socket.socket):
        return ""
    try:
        name = ask(connection)
    except OSError:
        return ""
    return host_and_port(name[0], name[1]) if type(name) is tuple else peek.text(name)


def _client(look: Look) -> str:
    return client_of([frame.f_code.co_filename for frame in look.outward(CLIENT_DEPTH)])


def _timeout_of(connection: object) -> Any:
    if not issubclass(type(connection), _socket.socket):
        return None
    return _socket.socket.gettimeout(connection)  # type: ignore[arg-type]


def _http_client(frame: FrameType, look: Look) -> OutsideWait | None:
    """http.client, and with it urllib3, requests and urllib: `self` is a connection or the body of an answer."""
    owner = peek.local(frame, "self")
    connection = peek.attribute(owner, "sock")
    if connection is None:  # an answer, which has taken the socket over
        connection = peek.path(owner, "fp.raw._sock")
    name = peek.attribute(owner, "host") or peek.attribute(owner, "_dns_host")  # urllib3 has a property in its place
    host = host_and_port(name, peek.attribute(owner, "port")) or peer_of(connection)
    timeout = _timeout_of(connection)
    inner = {each.f_code.co_name for each in look.frames[: look.depth + 1]}
    if "connect" in inner or "_new_conn" in inner:
        timeout = peek.number(peek.attribute(owner, "timeout"))
        return http_answer(host, timeout, _client(look), doing=_connecting(inner))
    sends = inner & {"send", "sendall", "write"}
    return http_answer(host, timeout, _client(look), doing="room to send to" if sends else "an HTTP answer from")


def _connecting(inner: set[str]) -> str:
    return "a TLS handshake with" if inner & {"do_handshake", "start_tls"} else "a connection to"


def _httpcore(frame: FrameType, look: Look) -> OutsideWait | None:
    """Sync httpcore, and with it httpx: `self` is the connection to one origin, or the pool of all."""
    inner = {each.f_code.co_name for each in look.frames[: look.depth]}
    origin = peek.attribute(peek.local(frame, "self"), "_origin")
    if origin is None:
        origin = peek.path(peek.local(frame, "request"), "url")
    host = host_and_port(peek.attribute(origin, "host"), peek.attribute(origin, "port"))
    timeout = next(
        (peek.local(each, "timeout") for each in look.frames[:5] if "/httpcore" in each.f_code.co_filename), None
    )
    doing = "an HTTP answer from"
    if "wait_for_connection" in inner:
        doing = "a free connection of the pool to"
    elif inner & {"connect_tcp", "start_tls"}:
        doing = _connecting(inner)
    return http_answer(host, timeout, _client(look), doing=doing)


def _rest_of_answer(frame: FrameType, look: Look) -> OutsideWait | None:
    url = peek.path(peek.local(frame, "self"), "_pool_request.request.url")
    host = host_and_port(peek.attribute(url, "host"), peek.attribute(url, "port"))
    return http_answer(host, look.local("/sync.py", "SyncStream.read", "timeout"), _client(look))


def _socket_file(frame: FrameType, look: Look) -> OutsideWait | None:
    return _on_socket(peek.attribute(peek.local(frame, "self"), "_sock"), "data from")


def _tls(frame: FrameType, look: Look) -> OutsideWait | None:
    shakes = frame.f_code.co_name == "do_handshake"
    return _on_socket(peek.local(frame, "self"), "a TLS handshake with" if shakes else "data from")


def _on_socket(connection: object, doing: str) -> OutsideWait | None:
    peer = peer_of(connection)
    return timed_wait("socket", f"{doing} {peer or 'a socket of this host'}", _timeout_of(connection), address=peer)


def _accept(frame: FrameType, look: Look) -> OutsideWait | None:
    listener = peek.local(frame, "self")
    own = _name_of(listener, _socket.socket.getsockname)
    text = f"somebody who connects to {own or 'it'}"
    return OutsideWait(kind="socket", text=text, address=own, timeout_s=peek.number(_timeout_of(listener)))


def _connect(frame: FrameType, look: Look) -> OutsideWait | None:
    address = peek.local(frame, "address")
    if type(address) is not tuple or len(address) < 2:
        return None
    peer = host_and_port(address[0], address[1])
    return timed_wait("socket", f"a connection to {peer}", peek.local(frame, "timeout"), address=peer)


def _resolve(frame: FrameType, look: Look) -> OutsideWait | None:
    host = peek.text(peek.local(frame, "host"))
    return OutsideWait(kind="socket", text=f"the address of {host} (DNS)", address=host) if host else None


def _connection(frame: FrameType, look: Look) -> OutsideWait | None:
    number = peek.integer(peek.attribute(peek.local(frame, "self"), "_handle"))
    found = system_calls.descriptor_of(number) if number is not None else None
    if found is None or number is None:
        return None
    wait = system_calls.wait_on_descriptor(found, number)
    doing = "room to send to" if frame.f_code.co_name == "_send" else "data from"
    text = f"{doing} {wait.text} (multiprocessing.Connection){'' if wait.pid else troubled_children()}"
    return OutsideWait(
        kind="process" if wait.kind == "file" else wait.kind, text=text, address=wait.address, pid=wait.pid
    )


def _listener(frame: FrameType, look: Look) -> OutsideWait | None:
    address = peek.attribute(peek.local(frame, "self"), "_address")
    name = host_and_port(*address[:2]) if type(address) is tuple and len(address) > 1 else peek.text(address)
    return OutsideWait(kind="socket", text=f"somebody who connects to {name} (multiprocessing.Listener)", address=name)


def _selector(frame: FrameType, look: Look) -> OutsideWait | None:
    """Return the first of the descriptors that a selector watches, and how many there are."""
    registered = peek.attribute(peek.local(frame, "self"), "_fd_to_key")
    if type(registered) is not dict or not registered:
        return None
    numbers = list(registered)
    first = next((number for number in numbers if type(number) is int), -1)
    descriptor = system_calls.descriptor_of(first)
    timeout = peek.number(peek.local(frame, "timeout"))
    if descriptor is None or descriptor.kind == "other":
        return OutsideWait(kind="socket", text=f"{len(numbers)} descriptors (select)", timeout_s=timeout)
    wait = system_calls.wait_on_descriptor(descriptor, first)
    more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
    return dataclasses.replace(wait, text=f"{wait.text}{more}", timeout_s=timeout)


RULES: Final = (
    Rule(
        "/http/client.py",
        (
            "HTTPConnection.getresponse", "HTTPConnection.send", "HTTPConnection.connect", "HTTPSConnection.connect",
            "HTTPConnection.endheaders", "HTTPResponse.read", "HTTPResponse.readinto", "HTTPResponse.readline",
            "HTTPResponse.peek", "HTTPResponse.read1",
        ),
        _http_client,
        reach=7
    ),
    Rule(
        "/urllib3/connection.py",
        ("HTTPConnection.connect", "HTTPSConnection.connect", "HTTPConnection.getresponse"),
        _http_client,
        reach=10
    ),
    Rule("/_sync/connection.py", ("HTTPConnection.handle_request",), _httpcore, reach=9),
    Rule(
        "/_sync/connection_pool.py",
        ("PoolRequest.wait_for_connection", "ConnectionPool.handle_request"),
        lambda frame, look: _httpcore(frame, look) if frame.f_code.co_name == "handle_request" else None,
        reach=4
    ),
    Rule("/_sync/connection_pool.py", ("PoolByteStream.__iter__",), _rest_of_answer, reach=9),
    Rule("/socket.py", ("SocketIO.readinto", "SocketIO.write"), _socket_file),
    Rule("/socket.py", ("socket.accept",), _accept),
    Rule("/socket.py", ("create_connection",), _connect),
    Rule("/urllib3/util/connection.py", ("create_connection",), _connect),
    Rule("/socket.py", ("getaddrinfo",), _resolve),
    Rule(
        "/ssl.py",
        ("SSLSocket.read", "SSLSocket.write", "SSLSocket.do_handshake", "SSLSocket.recv"),
        _tls
    ),
    Rule(
        "/multiprocessing/connection.py",
        ("Connection._recv", "Connection._send", "_ConnectionBase.poll", "_ConnectionBase.recv"),
        _connection,
        reach=5
    ),
    Rule("/multiprocessing/connection.py", ("Listener.accept",), _listener, reach=4),
    Rule(
        "/selectors.py",
        (
            "SelectSelector._select", "SelectSelector.select", "_PollLikeSelector.select", "EpollSelector.select",
        ),
        _selector
    ),
)  # fmt: skip
