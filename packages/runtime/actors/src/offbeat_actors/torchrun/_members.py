"""The other processes of the job, as the driver has them, from its beginning to its end."""

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from offbeat_actors._actor import ActorHandle, write_call
from offbeat_actors._agent import Order, Report, Started, decode, encode
from offbeat_actors._remote import AgentLink, AgentLostError
from offbeat_actors._spec import ClusterConfig, RoleSpec
from offbeat_actors._wire import STOP_ID, Channel, Result, SocketStream, Stop, write_frame
from offbeat_actors.torchrun._handshake import (
    HANDSHAKE_S,
    Hello,
    Welcome,
    admit,
    differing,
    watch_peer,
    write_message,
)
from offbeat_actors.torchrun._job import DriverAddress, Job
from offbeat_core import ConfigError, DeadlineError, OffbeatError, PeerFailedError, RoleName
from offbeat_placement import Node

T = TypeVar("T")

_log: Final = logging.getLogger(__name__)

_LOOPBACK: Final = "127.0.0.1"
_SLICE_S: Final = 0.2
"""Slice of the wait for members, so that a signal is seen."""
_ADMITTED_AT_ONCE: Final = 64
"""Handshakes at once, each in a thread: the port is open to whatever reaches this machine. Others wait for theirs."""
_LEAVE_S: Final = 5.0
"""Time for a member to take the exit code; it ends without it, too."""


class _MemberProcess:
    """Implements `RoleProcess` for a member: it lives as long as its connection."""

    def __init__(self, hello: Hello, address: str, sock: socket.socket) -> None:
        self.pid, self.address, self._socket = hello.pid, address, sock
        self.place = f" on {hello.host}"
        self._lost: asyncio.Future[int | str] = asyncio.get_running_loop().create_future()
        self._text = f"its node {hello.host} (rank {hello.rank}) was lost: the connection to its agent has ended"

    @property
    def alive(self) -> bool:
        return not self._lost.done()

    async def wait(self) -> int | str:
        return await asyncio.shield(self._lost)

    def send_signal(self, number: signal.Signals) -> None:
        """Only SIGKILL reaches a member: it ends, as its roles do, when its connection does."""
        if number == signal.SIGKILL and self.alive:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._lost.set_result(self._text)

    async def state(self) -> str:
        return ""


class MemberLink(AgentLink):
    """The agent of another node, over its connection. Its calls may be awaited in any event loop.

    Args:
        hello: of the agent.
        address: of its node, as this one sees it.
        loop: of the connection.
        handle: made there.
    """

    def __init__(self, hello: Hello, address: str, loop: asyncio.AbstractEventLoop, handle: ActorHandle) -> None:
        super().__init__(address)
        self.hello, self._loop, self._handle = hello, loop, handle
        self._ids = itertools.count(1)

    async def start_process(self, order: Order) -> Started:
        """Start a process: see `AgentLink`."""
        return decode(await self._call("start_process", encode(order), returns=bytes), Started)

    async def send(self, key: str, data: bytes) -> None:
        """Write to the socket of a process: see `AgentLink`."""
        await self._call("send", key, data, returns=None)

    async def receive(self, key: str, patience_s: float) -> Report:
        """Wait for news of a process: see `AgentLink`."""
        return decode(await self._call("receive", key, patience_s, returns=bytes), Report)

    async def state(self, key: str) -> str:
        """Return what a process is doing: see `AgentLink`."""
        return await self._call("state", key, returns=str)

    def send_signal(self, key: str, number: int) -> None:
        """Send a signal: see `AgentLink`."""
        asyncio.run_coroutine_threadsafe(self._request("send_signal", (key, number), None), self._loop)

    def kill(self) -> None:
        """End it and all its processes."""
        self._loop.call_soon_threadsafe(self._handle.kill)

    async def asked_to_end(self) -> int:
        """Wait for a signal that asks it to end, and return its number. To be awaited in the loop of the connection."""
        return int(await self._request("asked_to_end", (), int))

    async def leave(self, exit_code: int) -> None:
        """Have it exit with this code. To be awaited in the loop of the connection."""
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._request("leave", (exit_code,), None)
                await self._handle.request(STOP_ID, write_frame(Stop()))
        except (OffbeatError, TimeoutError):
            pass  # it ends without it
        finally:
            await self._handle.destroy()

    async def _call(self, method: str, *args: Any, returns: type[T] | None) -> T:
        calling = asyncio.run_coroutine_threadsafe(self._request(method, args, returns), self._loop)
        try:
            return await asyncio.wrap_future(calling)
        except PeerFailedError as error:
            self.lost = error.reason
            raise AgentLostError(self.lost) from error

    async def _request(self, method: str, args: tuple[Any, ...], returns: Any) -> Any:
        # Not `ActorHandle.call`: the calls of a role are edges of the graph of waits, and these would be more of them.
        call_id = next(self._ids)
        answer = await self._handle.request(call_id, write_call(call_id, method, args, {}))
        assert isinstance(answer.message, Result), "a failure is raised"
        return answer.unpack(answer.message.value, returns) if returns else None


@dataclass(frozen=True)
class _Admitted:
    hello: Hello
    sock: socket.socket
    address: str
    own_address: str


class Members:
    """All processes of the job but this one, the driver. There is one of it in a process.

    Args:
        job: of the driver.
        own: the driver's own node and configuration.
        cluster: deadlines.

    Attributes:
        address: IP address of this machine, as the other nodes see it; loopback where there is no other.
        links: to the agents of the other nodes, by the name of the node.

    Raises:
        ConfigError: a member has another configuration or other versions.
        DeadlineError: names the ranks that have not come in `start_timeout_s`.
    """

    def __init__(self, job: Job, own: Hello, cluster: ClusterConfig) -> None:
        self._job, self._own, self._cluster = job, own, cluster
        self._token = secrets.token_hex(32)
        self._admitted: dict[int, _Admitted] = {}
        self._claimed, self._admitting = set[int](), threading.Semaphore(_ADMITTED_AT_ONCE)
        self._refusal, self._changed = "", threading.Condition()
        self._store = job.open_store(cluster.start_timeout_s)
        with socket.create_server(("", 0), backlog=4096) as listener:
            threading.Thread(target=self._accept, args=(listener,), name="members", daemon=True).start()
            hosts = _own_hosts(job)
            job.publish(self._store, DriverAddress(hosts, int(listener.getsockname()[1]), self._token))
            self._wait_complete()
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends the thread that accepts
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nodes", daemon=True)
        self._thread.start()
        admitted = [self._admitted[rank] for rank in sorted(self._admitted)]
        self._all = self._run(self._open(admitted))
        self.address = next((each.own_address for each in admitted if each.own_address != _LOOPBACK), _LOOPBACK)
        agents = [link for link in self._all if link.hello.local_rank == 0]
        names = _node_names([own, *(link.hello for link in agents)])
        self.home = names[0]
        self.links = dict(zip(names[1:], agents, strict=True))

    def nodes(self) -> list[Node]:
        """Return the nodes of the job, the driver's first."""
        home = _node(self.home, self.address, self._own)
        return [home, *(_node(name, link.address, link.hello) for name, link in self.links.items())]

    def end(self, exit_code: int) -> None:
        """Have all members exit with this code."""
        self._run(self._leave(exit_code))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _leave(self, exit_code: int) -> None:
        for each in self._watching:
            each.cancel()
        await asyncio.gather(*(link.leave(exit_code) for link in self._all), *self._watching, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self, admitted: list[_Admitted]) -> list[MemberLink]:
        links = [self._link(each) for each in admitted]
        self._watching = {asyncio.create_task(_pass_signal_on(link)) for link in links}
        return links

    def _link(self, each: _Admitted) -> MemberLink:
        process = _MemberProcess(each.hello, each.address, each.sock)
        spec = RoleSpec(RoleName("node", each.hello.rank), "offbeat_actors.torchrun._member:Member")
        handle = ActorHandle(spec, process, Channel(SocketStream(each.sock)), self._cluster)
        return MemberLink(each.hello, each.address, self._loop, handle)

    def _wait_complete(self) -> None:
        deadline_s = self._cluster.start_timeout_s
        end_s = time.monotonic() + deadline_s
        with self._changed:
            while len(self._admitted) < self._job.size - 1 and not self._refusal and time.monotonic() < end_s:
                self._changed.wait(_SLICE_S)
            if self._refusal:
                raise ConfigError(self._refusal)
            if missing := sorted({*range(1, self._job.size)} - self._admitted.keys()):
                ranks = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
                advice = "see what they print (is their command the same?), or raise cluster.start_timeout_s"
                raise DeadlineError(
                    f"starting {self._job.size} processes", f"{ranks} of {self._job.size}", deadline_s, advice
                )

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, (address, *_) = listener.accept()
            except OSError:  # all have come, or the driver gives up
                return
            self._admitting.acquire()  # each holds it for the few messages of a handshake, which have a deadline
            threading.Thread(target=self._admit, args=(sock, address), daemon=True).start()

    def _admit(self, sock: socket.socket, address: str) -> None:
        try:
            self._shake_hands(sock, address)
        finally:
            self._admitting.release()

    def _shake_hands(self, sock: socket.socket, address: str) -> None:
        try:
            sock.settimeout(HANDSHAKE_S)
            watch_peer(sock)
            hello = admit(sock, self._token)
            with self._changed:  # also keeps two that claim one rank apart
                refusal = self._refuse(hello)
                self._refusal = self._refusal or refusal
                self._claimed.add(hello.rank)
            write_message(sock, Welcome(refusal))
        except OSError as error:
            _log.warning("a connection from %s was refused: %s", address, error)
            sock.close()
            return
        with self._changed:
            self._admitted[hello.rank] = _Admitted(hello, sock, address, str(sock.getsockname()[0]))
            self._changed.notify_all()

    def _refuse(self, hello: Hello) -> str:
        """Return why a process cannot be a member; "" where it can."""
        who = f"rank {hello.rank} on {hello.host}"
        if versions := differing(self._own.versions, hello.versions):
            pairs = ", ".join(
                f"{name} {hello.versions.get(name, 'missing')} instead of {self._own.versions.get(name, 'none')}"
                for name in versions
            )
            return f"{who} has other versions than rank 0: {pairs}; install the same on every node"
        if sections := differing(self._own.sections, hello.sections):
            names = ", ".join(f"[{name}]" for name in sections)
            return f"{who} has another configuration than rank 0, in {names}: use the same file and options"
        if not 0 < hello.rank < self._job.size or hello.rank in self._claimed:
            return f"{who} is there twice, or not one of the {self._job.size} ranks: start each once"
        return ""


async def _pass_signal_on(link: MemberLink) -> None:
    """Ask this process, the driver, to end when a member is asked to, as when its node is taken away."""
    with contextlib.suppress(OffbeatError):  # it is lost: the calls to its roles say so
        number = signal.Signals(await link.asked_to_end())
        who = f"rank {link.hello.rank} on {link.hello.host}"
        _log.warning("%s was asked to end (%s), and so is the run", who, number.name)
        os.kill(os.getpid(), signal.SIGTERM)


def _own_hosts(job: Job) -> list[str]:
    """Return names and addresses by which another node may reach this one.

    The store may be on another machine. Where it is on this one, its name may stand for loopback here (Debian), and so
    other nodes are also given the name.
    """
    hosts = [job.host]
    with contextlib.suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(job.host, job.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing: it picks the route
            hosts.insert(0, str(probe.getsockname()[0]))
    with contextlib.suppress(OSError):
        hosts += [str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys(hosts))


def _node_names(members: list[Hello]) -> list[str]:
    """Return the names of hosts; with the rank, where two nodes are on one host."""
    hosts = [each.host for each in members]
    return [each.host if hosts.count(each.host) == 1 else f"{each.host}/{each.rank}" for each in members]


def _node(name: str, address: str, hello: Hello) -> Node:
    held = {hello.device_kind: hello.num_devices} if hello.num_devices else {}
    return Node(
        name=name,
        address=address,
        free={kind: tuple(range(number)) for kind, number in held.items()},
        total=held,
        num_cpus=hello.num_cpus,
        memory_bytes=hello.memory_bytes,
        accelerator_memory_bytes=hello.device_bytes,
    )
